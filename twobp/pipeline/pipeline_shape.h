// The shape of a pipeline: how many ranks, stages and micro-batches, which rank holds which stage, and which layers a
// stage has.
#pragma once

#include <vector>

#include "twobp/models/model.h"
#include "twobp/pipeline/pipeline_config.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/transport/start.h"

namespace twobp {

// Defaults come from pipeline.schedule.
struct PipelineShape {
  int ranks = 0;
  int stages = 0;
  std::vector<int> rank_of_stage;
  int micro_batches = 0;
};

// `schedule` is that of pipeline.schedule; without it, a file is read now. Throws Error if it cannot be read, or if
// pipeline.stages, ranks or micro_batches do not fit it.
PipelineShape pipeline_shape(const PipelineConfig& config);
PipelineShape pipeline_shape(const PipelineConfig& config, const ScheduleSource& schedule);

// What a start of the run's processes needs of the configuration. Throws Error as pipeline_shape does.
StartOptions start_options(const PipelineConfig& config);

// Cuts the layers into stages by the model's measured costs, if the configuration gives no split.

// The number of layers of each stage. The busiest rank is as fast as possible (balanced_split). With one stage on each
// rank, all splits within 2 % of the best count as equal, because profiles cannot tell them apart. Among these it takes
// the split whose fullest rank needs the least memory: activations of as many micro-batches as 1F1B holds on that
// stage, weights, their gradients, and two numbers of optimizer state for each weight. With several stages on each
// rank, it prefers instead stages of one rank that are equally long. `costs`: by layer.
std::vector<int> measured_split(const ModelSpec& model, const std::vector<LayerCost>& costs,
                                const std::vector<int>& rank_of_stage);

// The costs of each stage's layers. With slices, those of the first slice come first.
std::vector<std::vector<LayerCost>> layer_costs_of_stages(const ModelSpec& model, const std::vector<Profile>& slices,
                                                          const std::vector<int>& split);

}  // namespace twobp
