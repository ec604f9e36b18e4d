// The shape of a pipeline: how many ranks, stages and micro-batches, and which rank holds which stage.
#pragma once

#include <vector>

#include "twobp/pipeline/pipeline_config.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp {

// As pipeline.schedule has them where the configuration does not say.
struct PipelineShape {
  int ranks = 0;
  int stages = 0;
  std::vector<int> rank_of_stage;
  int micro_batches = 0;
};

// `schedule`: pipeline.schedule's, which is read now where it is a file and not given. Throws Error when it
// cannot be read, and when pipeline.stages, ranks or micro_batches do not fit it.
PipelineShape pipeline_shape(const PipelineConfig& config);
PipelineShape pipeline_shape(const PipelineConfig& config, const ScheduleSource& schedule);

}  // namespace twobp
