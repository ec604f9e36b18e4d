// Makes the model and the pipeline's settings from the configuration.
#pragma once

#include <string>

#include "twobp/models/model.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/train/config.h"

namespace twobp {

// `precision` is "fp32", "bf16" or "fp16".
at::ScalarType compute_dtype(const std::string& precision);

// The model for training, in train.precision. Layers that match pipeline.recompute recompute. Throws Error if one of
// its rules fits no layer.
ModelSpec build_model(const Config& config);

PipelineOptions pipeline_options(const Config& config, const PipelineShape& shape);

}  // namespace twobp
