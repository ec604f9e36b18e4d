// From the configuration to the library: the model, and the pipeline's settings.
#pragma once

#include <string>

#include "twobp/models/model.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/train/config.h"

namespace twobp {

// "fp32", "bf16", "fp16".
at::ScalarType compute_dtype(const std::string& precision);

// The model for training: in train.precision, and with layers that compute again what pipeline.recompute
// says. Throws Error: a rule there that fits no layer.
ModelSpec build_model(const Config& config);

PipelineOptions pipeline_options(const Config& config, const PipelineShape& shape);

}  // namespace twobp
