// From the configuration to the library: the model, and the pipeline's settings.
#pragma once

#include "twobp/models/model.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/config/config.h"

namespace twobp {

// "fp32", "bf16", "fp16".
at::ScalarType compute_dtype(const std::string& precision);

// How many ranks, stages and micro-batches, and which rank holds which stage: as pipeline.schedule has them
// where the configuration does not say. `schedule`: pipeline.schedule's, which is read now where it is a file
// and not given. Throws Error when it cannot, and when pipeline.stages, ranks or micro_batches do not fit it.
struct PipelineShape {
  int ranks = 0;
  int stages = 0;
  std::vector<int> rank_of_stage;
  int micro_batches = 0;
};
PipelineShape pipeline_shape(const PipelineConfig& config);
PipelineShape pipeline_shape(const PipelineConfig& config, const ScheduleSource& schedule);

ModelSpec build_model(const ModelConfig& config, at::ScalarType dtype = at::kFloat);
// The same for training: in train.precision, and with layers that compute again what pipeline.recompute says.
// Throws Error: a rule there that fits no layer.
ModelSpec build_model(const Config& config);
PipelineOptions pipeline_options(const Config& config, const PipelineShape& shape);
// pipeline_shape's.
int micro_batches(const PipelineConfig& config);

}  // namespace twobp
