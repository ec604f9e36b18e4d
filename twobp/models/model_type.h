// The model types. Each is one part of this folder with its options, which are keys of the section `model`, its layers,
// and Hugging Face's names of both. The families of decoders are a type each, with the same struct of options.
// model_type.cpp has the table. The rest of the program knows no model by name.
#pragma once

#include <any>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twobp/config/section.h"
#include "twobp/data/data_config.h"
#include "twobp/models/checked_json.h"
#include "twobp/models/model.h"
#include "twobp/models/model_config.h"
#include "twobp/models/model_weights.h"
#include "twobp/nn/layers/lora_linear.h"

namespace twobp {

// The settings for building a model, in addition to its options.
struct BuildSettings {
  at::ScalarType dtype = at::kFloat;
  LoraOptions lora{};  // with a rank, the caller freezes everything except the adapters
  ExpertShare experts{};
};

struct ModelType {
  std::string name;  // model.type
  Section options;   // the keys that only this type has, and the default options
  std::any defaults;
  void* (*values)(std::any& options) = nullptr;

  std::string hf_type;                 // "model_type" of config.json; empty: such models are not read or written
  std::string hf_class;                // an entry of "architectures"
  std::vector<std::string> hf_others;  // other classes whose weights can be read; heads may be missing
  std::function<TensorNames(const ModelOptions&)> names;  // of the tensors of these classes
  bool lora = false;                                      // has Linear layers that take adapters
  std::string peft_task;                                  // "task_type" of PEFT; empty: PEFT has none for this class
  bool transposed = false;                                // some weights are (in, out): PEFT's fan_in_fan_out
  std::vector<std::string> peft_excludes;  // projections whose adapters PEFT refuses or transformers ignores
  bool reduced_precision = false;          // computes in bf16 and fp16 too
  bool is_bundle = false;                  // a saved folder is that of model.from with other weights

  // The folder of the weights, if that is not model.from; else "".
  std::function<std::string(const ModelOptions&)> weights;
  std::function<ModelInput(const ModelOptions&)> input;
  // Sets options whose default is derived from other options (heads of 0, widths of 0).
  std::function<void(ModelOptions&)> fill_in;
  // Throws Error for contradictions between options. The keys check single options.
  std::function<void(const ModelOptions&)> check;
  std::function<ModelSpec(const ModelOptions&, const BuildSettings&)> build;
  // The train.precision that a bundle was captured for. Empty for other models.
  std::function<std::string(const ModelOptions&)> captured_for;
  // The reason why the model cannot run on a device other than a CPU. Empty if it can.
  std::function<std::string(const ModelOptions&)> no_device;
  // The reason why steps of this model cannot be a CUDA graph. Empty if they can.
  std::function<std::string(const ModelOptions&)> no_graph;
  // The reason why its sequences cannot be cut into slices (pipeline.slices). Empty if they can.
  std::function<std::string(const ModelOptions&)> no_slices;
  // Reads the options from config.json. Throws Error if one is missing or has the wrong type, or if the file asks for
  // another computation than ours.
  std::function<void(const CheckedJson& file, ModelOptions&)> read_hf;
  // Writes the options to config.json, over that of a loaded model. `sequence` is the longest one that the model must
  // accept. Throws Error for options that transformers refuses.
  std::function<void(const ModelOptions&, int64_t sequence, nlohmann::json& out)> write_hf;
};

// A type whose functions take Options. Each model's file fills in the rest.
template <typename Options>
ModelType make_model_type(std::vector<Key> keys) {
  ModelType type;
  type.name = Options::kType;
  type.options = make_section<Options>(type.name, std::move(keys));
  type.defaults = Options{};
  type.values = [](std::any& options) -> void* { return std::any_cast<Options>(&options); };
  type.check = [](const ModelOptions&) {};
  type.fill_in = [](ModelOptions&) {};
  type.names = [](const ModelOptions&) { return TensorNames(); };
  type.weights = [](const ModelOptions&) { return std::string(); };
  type.captured_for = [](const ModelOptions&) { return std::string(); };
  type.no_device = [](const ModelOptions&) { return std::string(); };
  type.no_graph = [](const ModelOptions&) { return std::string(); };
  type.no_slices = [](const ModelOptions&) {
    return std::string("its layers read all positions of a sequence at once, or it has no sequences");
  };
  return type;
}

const std::vector<ModelType>& model_types();
std::vector<std::string> model_type_names();
// The supported models of Hugging Face: "llama (LlamaForCausalLM), ...".
std::string hf_models();
// Throws Error if the name is unknown.
const ModelType& model_type(const std::string& name);

}  // namespace twobp
