// The section `model` of the configuration, and the model that it describes.
#pragma once

#include <any>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "twobp/config/section.h"
#include "twobp/data/data_config.h"
#include "twobp/models/model.h"

namespace twobp {

class ModelWeights;
struct LoraOptions;
struct ModelType;

// The options of one model type, by value: DecoderOptions, BertOptions and so on.
class ModelOptions : public Choice {
 public:
  ModelOptions();  // of a LLaMa
  // Throws Error if the type is unknown.
  explicit ModelOptions(const std::string& type);
  template <typename Options>
  requires(requires { Options::kType; }) ModelOptions(Options options)
      : ModelOptions(std::string(Options::kType)) {  // NOLINT: a value of it
    as<Options>() = std::move(options);
  }

  const ModelType& type() const { return *type_; }
  // Throws Error if the options are of another type.
  template <typename Options>
  Options& as() {
    auto* options = std::any_cast<Options>(&options_);
    if (options == nullptr) throw_other_type(Options::kType);
    return *options;
  }
  template <typename Options>
  const Options& as() const {
    const auto* options = std::any_cast<Options>(&options_);
    if (options == nullptr) throw_other_type(Options::kType);
    return *options;
  }

  const std::string& name() const override;
  void choose(const std::string& name) override { *this = ModelOptions(name); }
  SectionValues chosen() override;
  std::vector<const Section*> alternatives() const override;

 private:
  [[noreturn]] void throw_other_type(const char* wanted) const;

  const ModelType* type_;
  std::any options_;
};

struct ModelConfig {
  std::string from;                 // Hugging Face directory: options and weights; empty: a new model
  ModelOptions type;                // model.type, with the options of that type
  std::vector<std::string> freeze;  // patterns (* and ?) of parameter names to freeze
  int64_t lora = 0;                 // rank of the LoRA adapters, which are then the only trained parameters; 0: none
  std::string adapter;              // folder of a saved adapter to start from (PEFT); empty: a new one
  double lora_alpha = 16;           // adapters are scaled by alpha / rank
  std::vector<std::string> lora_targets = {"q_proj", "v_proj"};

  ModelInput input() const;
  // The weights that `from` has for the model. Throws Error as ModelWeights does.
  ModelWeights weights() const;
  LoraOptions adapters() const;
};

const Section& model_section();

// Throws Error for contradictions between keys.
void check_model(const ModelConfig& config);

// Throws Error as freeze() and check_lora_targets() do.
// `experts`: the part of each layer's experts that this replica holds.
ModelSpec build_model(const ModelConfig& config, at::ScalarType dtype = at::kFloat, ExpertShare experts = {});

}  // namespace twobp
