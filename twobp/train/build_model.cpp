#include "twobp/train/build_model.h"

#include "twobp/core/check.h"
#include "twobp/nn/models/freeze.h"
#include "twobp/nn/models/llama.h"
#include "twobp/schedule/generators.h"

namespace twobp {

int64_t mlp_width(const ModelConfig& config) {
  return config.hidden > 0 ? config.hidden : (config.dim * 8 / 3 + 63) / 64 * 64;
}

at::ScalarType compute_dtype(const std::string& precision) {
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  TWOBP_CHECK(precision == "fp32", "unknown precision '", precision, "'");
  return at::kFloat;
}

ModelSpec build_model(const ModelConfig& config, at::ScalarType dtype) {
  if (config.type == "mlp") {
    MlpOptions options;
    options.dim = config.dim;
    options.layers = config.layers;
    options.hidden = mlp_width(config);
    options.norm_eps = config.norm_eps;
    options.init_std = config.init_std;
    return mlp(options);
  }
  TWOBP_CHECK(config.type == "llama", "unknown model type '", config.type, "'");
  LlamaOptions options;
  options.vocab = config.vocab;
  options.dim = config.dim;
  options.layers = config.layers;
  options.heads = config.heads;
  options.kv_heads = config.kv_heads > 0 ? config.kv_heads : config.heads;
  options.head_dim = config.head_dim > 0 ? config.head_dim : config.dim / config.heads;
  options.hidden = mlp_width(config);
  options.norm_eps = config.norm_eps;
  options.rope = {config.rope_theta,     parse_rope_scaling(config.rope_scaling),
                  config.rope_factor,    config.rope_low_freq,
                  config.rope_high_freq, config.rope_original_positions};
  options.tied = config.tied;
  options.init_std = config.init_std;
  options.dtype = dtype;
  options.lora = {config.lora, config.lora_alpha, config.lora_targets};
  ModelSpec model = llama(options);
  if (config.lora > 0) {
    check_lora_targets(model, options.lora);
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
