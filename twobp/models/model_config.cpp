#include "twobp/models/model_config.h"

#include "twobp/core/check.h"
#include "twobp/models/freeze.h"
#include "twobp/models/model_type.h"
#include "twobp/models/model_weights.h"

namespace twobp {

LoraOptions ModelConfig::adapters() const {
  return {lora, lora_alpha, lora_targets};
}

ModelInput ModelConfig::input() const {
  ModelInput input = type.type().input(type);
  input.type = type.name();
  input.from = from;
  return input;
}

ModelWeights ModelConfig::weights() const {
  const std::string elsewhere = type.type().weights(type);
  return ModelWeights(elsewhere.empty() ? from : elsewhere, type.type().names(type));
}

const Section& model_section() {
  static const Section section = make_section<ModelConfig>(
      "model",
      {TWOBP_KEY(ModelConfig, from,
                 "Hugging Face directory or bundle of a captured model to start from, which sets the architecture; "
                 "\"\": a new model")
           .path(),
       TWOBP_KEY(ModelConfig, type,
                 "architecture; llama to starcoder2 are decoders, mlp is a stack of identical MLP blocks, "
                 "for benchmarks")
           .one_of(model_type_names()),
       TWOBP_KEY(ModelConfig, freeze, "patterns (* and ?) of the names of parameters that are not trained"),
       TWOBP_KEY(ModelConfig, lora, "rank of the LoRA adapters, which are then the only trained parameters; 0: none")
           .from(0, kMaxCount),
       TWOBP_KEY(ModelConfig, adapter, "folder of a LoRA adapter to continue from, as PEFT saves it; \"\": a new one")
           .path(),
       TWOBP_KEY(ModelConfig, lora_alpha, "LoRA adapters are scaled by lora_alpha / lora").above(0),
       TWOBP_KEY(ModelConfig, lora_targets, "endings of the names of the projections that get an adapter")});
  return section;
}

void check_model(const ModelConfig& config) {
  const ModelType& type = config.type.type();
  type.check(config.type);
  TWOBP_CHECK(type.lora || config.lora == 0, "model.lora is ", config.lora, ", but model.type \"", type.name,
              "\" takes no adapters.");
  TWOBP_CHECK(config.lora == 0 || !config.lora_targets.empty(), "model.lora is ", config.lora,
              ", but model.lora_targets is empty: name projections, such as q_proj.");
  TWOBP_CHECK(config.lora > 0 || config.adapter.empty(),
              "model.adapter is set, but model.lora is 0: set it to the adapter's rank.");
  const ModelConfig usual;
  for (const auto& [key, set] : {std::pair{"lora_alpha", config.lora_alpha != usual.lora_alpha},
                                 std::pair{"lora_targets", config.lora_targets != usual.lora_targets}}) {
    TWOBP_CHECK(config.lora > 0 || !set, "model.", key,
                " is set, but model.lora is 0, so there is no adapter: set model.lora to its rank.");
  }
}

ModelSpec build_model(const ModelConfig& config, at::ScalarType dtype, ExpertShare experts) {
  ModelSpec model = config.type.type().build(config.type, {dtype, config.adapters(), experts});
  if (config.lora > 0) {
    check_lora_targets(model, config.adapters());
    freeze_all_but_lora(model);
  }
  freeze(model, config.freeze);
  return model;
}

}  // namespace twobp
