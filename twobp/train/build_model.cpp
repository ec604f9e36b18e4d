#include "twobp/train/build_model.h"

#include "twobp/core/check.h"
#include "twobp/nn/models/freeze.h"
#include "twobp/schedule/generators.h"
#include "twobp/train/architecture.h"

namespace twobp {

at::ScalarType compute_dtype(const std::string& precision) {
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  TWOBP_CHECK(precision == "fp32", "unknown precision '", precision, "'");
  return at::kFloat;
}

ModelSpec build_model(const ModelConfig& config, at::ScalarType dtype) {
  ModelSpec model = architecture(config.type).build(config, dtype);
  if (config.lora > 0) {
    check_lora_targets(model, {config.lora, config.lora_alpha, config.lora_targets});
    freeze_all_but_lora(model);
  }
  freeze(model, config.freeze);
  return model;
}

PipelineOptions pipeline_options(const Config& config) {
  PipelineOptions options;
  options.stages = config.pipeline.stages;
  options.split = config.pipeline.split;
  options.threads.threads_per_rank = config.pipeline.threads;
  options.threads.pin = config.pipeline.pin;
  options.seed = config.train.seed;
  return options;
}

int micro_batches(const PipelineConfig& config) {
  return config.micro_batches > 0 ? config.micro_batches
                                  : default_micro_batches(config.schedule, config.stages);
}

}  // namespace twobp
