// The model types. Each is one file of this folder: its options, which are keys of the section `model`, its
// layers, and what Hugging Face calls both. The table is in model_type.cpp; the rest of the program knows no
// model by name.
#pragma once

#include <any>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twobp/config/section.h"
#include "twobp/data/model_input.h"
#include "twobp/models/hf_section.h"
#include "twobp/models/model.h"
#include "twobp/models/model_weights.h"
#include "twobp/nn/layers/lora_linear.h"

namespace twobp {

struct ModelType;

// The options of one model type, by value: of LlamaOptions, BertOptions and so on.
class ModelOptions : public Choice {
 public:
  ModelOptions();  // of a LLaMa
  // Throws Error: unknown.
  explicit ModelOptions(const std::string& type);
  template <typename Options>
  requires(requires { Options::kType; }) ModelOptions(Options options)
      : ModelOptions(std::string(Options::kType)) {  // NOLINT: a value of it
    as<Options>() = std::move(options);
  }

  const ModelType& type() const { return *type_; }
  // Throws Error if they are of another type.
  template <typename Options>
  Options& as() {
    check_type(Options::kType);
    return *std::any_cast<Options>(&options_);
  }
  template <typename Options>
  const Options& as() const {
    check_type(Options::kType);
    return *std::any_cast<Options>(&options_);
  }

  const std::string& name() const override;
  void choose(const std::string& name) override { *this = ModelOptions(name); }
  SectionValues chosen() override;
  std::vector<const Section*> alternatives() const override;

 private:
  void check_type(const char* wanted) const;

  const ModelType* type_;
  std::any options_;
};

// What a model is built with, beside its options.
struct BuildSettings {
  at::ScalarType dtype = at::kFloat;
  LoraOptions lora{};  // with a rank, all but the adapters is to be frozen
};

struct ModelType {
  std::string name;  // model.type
  Section options;   // the keys that only this type has, and the options' defaults
  std::any defaults;
  void* (*values)(std::any& options) = nullptr;

  std::string hf_type;   // "model_type" of config.json; empty: such models are not read or written
  std::string hf_class;  // of "architectures"
  std::vector<std::string> hf_others;    // other classes whose weights are read, where heads may be missing
  TensorNames names;                     // of their tensors
  bool lora = false;                     // has Linear layers that take adapters
  bool reduced_precision = false;        // computes in bf16 and fp16 too
  bool forward_changes_buffers = false;  // such as running statistics

  std::function<ModelInput(const ModelOptions&)> input;
  // Sets options whose default stands for a value of others (heads of 0, widths of 0).
  std::function<void(ModelOptions&)> fill_in;
  // Contradictions between options; single ones are checked by their keys. Throws Error.
  std::function<void(const ModelOptions&)> check;
  std::function<ModelSpec(const ModelOptions&, const BuildSettings&)> build;
  // Why steps of this model cannot be a CUDA graph; empty: they can.
  std::function<std::string(const ModelOptions&)> no_graph;
  // The options from config.json. Throws Error: missing, ill-typed, or computed otherwise than the file says.
  std::function<void(const HfSection& file, ModelOptions&)> read_hf;
  // The other way, over the config.json of a loaded model. `sequence` is the longest that the model must
  // take.
  std::function<void(const ModelOptions&, int64_t sequence, nlohmann::json& out)> write_hf;
};

// A type whose functions take Options; each file of a model fills in the rest.
template <typename Options>
ModelType make_model_type(std::vector<Key> keys) {
  ModelType type;
  type.name = Options::kType;
  type.options = make_section<Options>(type.name, std::move(keys));
  type.defaults = Options{};
  type.values = [](std::any& options) -> void* { return std::any_cast<Options>(&options); };
  type.check = [](const ModelOptions&) {};
  type.fill_in = [](ModelOptions&) {};
  type.no_graph = [](const ModelOptions&) { return std::string(); };
  return type;
}

const std::vector<ModelType>& model_types();
std::vector<std::string> model_type_names();
// Those of Hugging Face: "llama (LlamaForCausalLM), ...".
std::string hf_models();
// Throws Error: unknown.
const ModelType& model_type(const std::string& name);

}  // namespace twobp
