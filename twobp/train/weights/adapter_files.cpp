#include "twobp/train/weights/adapter_files.h"

#include <filesystem>
#include <map>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/files/hub_hint.h"
#include "twobp/files/json_file.h"
#include "twobp/files/new_file.h"
#include "twobp/files/safetensors.h"
#include "twobp/nn/layers/lora_linear.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr const char* kPrefix = "base_model.model.";  // PEFT's wrapper around the model

std::map<std::string, Parameter*> adapters_of(const std::vector<Parameter*>& weights) {
  std::map<std::string, Parameter*> adapters;
  for (Parameter* weight : weights) {
    if (is_adapter(weight->name())) adapters[weight->name()] = weight;
  }
  return adapters;
}

// The adapters by name, with their shapes.
std::map<std::string, std::vector<int64_t>> adapters_of(const ModelSpec& model) {
  std::map<std::string, std::vector<int64_t>> adapters;
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();  // allocates nothing
    std::vector<Parameter*> parameters;
    layer->collect_parameters(parameters);
    for (const Parameter* parameter : parameters) {
      if (is_adapter(parameter->name())) adapters[parameter->name()] = parameter->sizes();
    }
  }
  return adapters;
}

// Writes PEFT's two files.
void write_adapter(const std::string& directory, const ModelConfig& model, const NamedTensors& tensors) {
  TWOBP_CHECK(!tensors.empty(), "save.lora is \"adapter\", but the model has no adapters: set model.lora");
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  TWOBP_CHECK(!error, "cannot create the folder ", directory, ": ", error.message());
  const json description = {{"peft_type", "LORA"},
                            {"task_type", "CAUSAL_LM"},
                            {"base_model_name_or_path", model.from},
                            {"r", model.lora},
                            {"lora_alpha", model.lora_alpha},
                            {"lora_dropout", 0.0},
                            {"target_modules", model.lora_targets},
                            {"bias", "none"},
                            {"fan_in_fan_out", false},
                            {"inference_mode", true}};
  const std::filesystem::path folder(directory);
  write_safetensors((folder / "adapter_model.safetensors").string(), tensors, {{"format", "pt"}});
  NewFile file(folder / "adapter_config.json");
  const std::string text = description.dump(2) + "\n";
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace

NamedTensors merged_weights(const std::vector<Parameter*>& weights, const ModelConfig& model) {
  const auto adapters = adapters_of(weights);
  NamedTensors merged;
  for (const Parameter* weight : weights) {
    if (is_adapter(weight->name())) continue;
    for (auto& [name, tensor] : weight->parts_of(weight->master)) {
      const std::string module = module_of(name);
      const auto a = adapters.find(module + ".lora_A.weight");
      const auto b = adapters.find(module + ".lora_B.weight");
      if (a != adapters.end() && b != adapters.end()) {
        const double scale = model.lora_alpha / static_cast<double>(model.lora);
        tensor = tensor.to(at::kFloat)
                     .addmm(b->second->master.to(at::kFloat), a->second->master.to(at::kFloat), 1, scale);
      }
      merged.emplace_back(name, tensor);
    }
  }
  return merged;
}

void save_adapter(const std::string& directory, const ModelConfig& model,
                  const std::vector<Parameter*>& weights, const Processes& processes) {
  json names = json::array();
  Values values;
  for (const auto& [name, adapter] : adapters_of(weights)) {
    names.push_back(name);
    values.push_back(adapter->master);
  }
  const std::vector<std::string> all_names = processes.to_first(names.dump());
  const std::vector<Values> all_values = processes.tensors_to_first(values);
  processes.together([&] {
    std::map<std::string, at::Tensor> tensors;
    for (size_t process = 0; process < all_names.size(); ++process) {
      const json names_there = json::parse(all_names[process]);
      for (size_t i = 0; i < names_there.size(); ++i) {
        tensors.emplace(kPrefix + names_there[i].get<std::string>(), all_values[process].at(i));
      }
    }
    if (processes.is_first()) write_adapter(directory, model, {tensors.begin(), tensors.end()});
  });
}

void load_adapter(const std::string& directory, const ModelConfig& model, const ModelSpec& spec,
                  const std::vector<Parameter*>& weights) {
  const std::filesystem::path folder(directory);
  const std::string config_path = (folder / "adapter_config.json").string();
  std::error_code missing;
  TWOBP_CHECK(std::filesystem::exists(config_path, missing), config_path, hub_hint(directory),
              ": no such file: give the folder of a LoRA adapter");
  const json config = read_json_object(config_path, /*max_depth=*/8);
  TWOBP_CHECK(config.value("peft_type", json("")) == json("LORA"), config_path,
              ": not the description of a LoRA adapter");
  const json rank = config.value("r", json());
  TWOBP_CHECK(rank.is_number_integer() && rank.get<int64_t>() == model.lora, config_path,
              ": the adapter's rank is ", rank.dump(), ", but model.lora is ", model.lora,
              ": set it to the adapter's");
  const json alpha = config.value("lora_alpha", json());
  TWOBP_CHECK(alpha.is_number() && alpha.get<double>() == model.lora_alpha, config_path,
              ": the adapter's lora_alpha is ", alpha.dump(), ", but model.lora_alpha is ", model.lora_alpha,
              ": set it to the adapter's");
  for (const char* key : {"use_rslora", "use_dora", "fan_in_fan_out"}) {
    TWOBP_CHECK(config.value(key, json(false)) == json(false), config_path, ": ", key,
                " is set, which is not supported");
  }
  for (const char* key : {"alpha_pattern", "rank_pattern"}) {
    TWOBP_CHECK(config.value(key, json()).empty(), config_path, ": ", key,
                " is not empty: only adapters of one rank and alpha are supported");
  }
  const SafetensorsFile tensors((folder / "adapter_model.safetensors").string());
  const auto here = adapters_of(weights);
  auto adapters = adapters_of(spec);
  for (const std::string& name : tensors.names()) {
    const bool prefixed = name.starts_with(kPrefix);
    const auto adapter = adapters.find(prefixed ? name.substr(std::string(kPrefix).size()) : name);
    TWOBP_CHECK(adapter != adapters.end(), folder.string(), ": the adapter has ", name,
                ", which is no adapter of this model: set model.lora_targets to its target_modules, ",
                config.value("target_modules", json()).dump());
    const at::Tensor tensor = tensors.tensor(name);
    TWOBP_CHECK(tensor.sizes() == at::IntArrayRef(adapter->second), folder.string(), ": ", name, " is ",
                tensor.sizes(), ", expected ", at::IntArrayRef(adapter->second));
    TWOBP_CHECK(tensor.is_floating_point(), folder.string(), ": ", name, " is of type ",
                c10::toString(tensor.scalar_type()), ", not of floating point numbers");
    if (const auto local = here.find(adapter->first); local != here.end()) {
      local->second->master.copy_(tensor);
      local->second->refresh_value();
    }
    adapters.erase(adapter);
  }
  TWOBP_CHECK(adapters.empty(), folder.string(), ": the adapter has no ",
              adapters.empty() ? "" : adapters.begin()->first,
              ": set model.lora_targets to its target_modules, ",
              config.value("target_modules", json()).dump());
}

}  // namespace twobp
