// The section `model` of the configuration, and the model that it describes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/models/model_type.h"

namespace twobp {

struct ModelConfig {
  std::string from;                 // Hugging Face directory: options and weights; empty: a new model
  ModelOptions type;                // model.type, with the options of that type
  std::vector<std::string> freeze;  // patterns (* and ?) of parameter names to freeze
  int64_t lora = 0;        // rank of the LoRA adapters, which are then the only trained parameters; 0: none
  std::string adapter;     // folder of a saved adapter to start from (PEFT); empty: a new one
  double lora_alpha = 16;  // adapters are scaled by alpha / rank
  std::vector<std::string> lora_targets = {"q_proj", "v_proj"};

  ModelInput input() const;
  // The weights that `from` has for the model. Throws Error as ModelWeights does.
  ModelWeights weights() const;
  LoraOptions adapters() const { return {lora, lora_alpha, lora_targets}; }
};

const Section& model_section();

// Throws Error for contradictions between keys.
void check_model(const ModelConfig& config);

// Throws Error as freeze() and check_lora_targets() do.
ModelSpec build_model(const ModelConfig& config, at::ScalarType dtype = at::kFloat);

}  // namespace twobp
