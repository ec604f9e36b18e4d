// The model types: what each reads, how it is built from the configuration, and how Hugging Face's
// config.json says the same. One file each in architectures/; the table is in architecture.cpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include "twobp/models/model.h"
#include "twobp/config/config.h"
#include "twobp/models/hf_section.h"
#include "twobp/models/model_weights.h"

namespace twobp {

enum class ModelInput : uint8_t {
  kTokens,        // input_ids, labels: the token that follows
  kMaskedTokens,  // input_ids, labels: the token that was masked
  kImages,        // pixel_values, labels: a class each
  kVectors,       // input, target
};

// What a Batch's `tokens` are of: "tokens", "images", "vectors".
std::string_view item_name(ModelInput input);

struct Architecture {
  std::string type;  // model.type
  ModelInput input = ModelInput::kTokens;
  std::string hf_type;   // "model_type" of config.json; empty: such models are not read or written
  std::string hf_class;  // of "architectures"
  std::vector<std::string> hf_others;  // other classes whose weights are read, where heads may be missing
  TensorNames names;                   // of their tensors
  bool lora = false;                   // has Linear layers that take adapters
  bool reduced_precision = false;      // computes in bf16 and fp16 too

  // Sets keys whose default stands for a value of other keys (heads of 0, widths of 0).
  void (*fill_in)(ModelConfig& config) = nullptr;
  // The longest sequence. Null: any.
  int64_t (*longest)(const ModelConfig& config) = nullptr;
  // Contradictions between keys; single keys are checked by the table. Throws Error.
  void (*check)(const ModelConfig& config) = nullptr;
  ModelSpec (*build)(const ModelConfig& config, at::ScalarType dtype) = nullptr;
  // The architecture keys of `config` from config.json. Throws Error: missing, ill-typed, or something that
  // would be computed otherwise than the file says.
  void (*read_hf)(const HfSection& file, ModelConfig& config) = nullptr;
  // The other way, over what a loaded model's config.json has. `sequence` is the longest the model must take.
  void (*write_hf)(const ModelConfig& config, int64_t sequence, nlohmann::json& out) = nullptr;
};

const std::vector<Architecture>& architectures();
std::vector<std::string> architecture_names();
// Those of Hugging Face: "llama (LlamaForCausalLM), ...".
std::string hf_models();
// Throws Error: unknown.
const Architecture& architecture(const std::string& type);

}  // namespace twobp
