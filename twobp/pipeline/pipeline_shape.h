// The shape of a pipeline: how many ranks, stages and micro-batches, and which rank holds which stage.
#pragma once

#include <vector>

#include "twobp/pipeline/pipeline_config.h"
#include "twobp/schedule/schedule_source.h"

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

}  // namespace twobp
