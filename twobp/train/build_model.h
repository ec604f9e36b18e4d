// From the configuration to the library: the model, and the pipeline's settings.
#pragma once

#include "twobp/nn/models/model.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/config.h"

namespace twobp {

// "fp32", "bf16", "fp16".
at::ScalarType compute_dtype(const std::string& precision);

ModelSpec build_model(const ModelConfig& config, at::ScalarType dtype = at::kFloat);
PipelineOptions pipeline_options(const Config& config);
// The configured number of micro-batches, or the schedule's default.
int micro_batches(const PipelineConfig& config);

}  // namespace twobp
