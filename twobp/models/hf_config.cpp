#include "twobp/models/hf_config.h"

#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/files/input_file.h"
#include "twobp/files/paths.h"
#include "twobp/models/captured.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;

// Null: the model_type is not supported.
const ModelType* find_type(const CheckedJson& file) {
  const json* type = file.find("model_type");
  const auto& all = model_types();
  const auto found = std::find_if(all.begin(), all.end(), [&](const ModelType& one) {
    return !one.hf_type.empty() && type != nullptr && *type == one.hf_type;
  });
  return found == all.end() ? nullptr : &*found;
}

std::vector<std::string> supported_classes(const ModelType& type) {
  std::vector<std::string> classes = type.hf_others;
  classes.insert(classes.begin(), type.hf_class);
  return classes;
}

// Whether "architectures", if it is there, names a supported class.
bool has_class(const CheckedJson& file, const ModelType& type) {
  const json* classes = file.find("architectures");
  if (classes == nullptr) return true;
  const std::vector<std::string> supported = supported_classes(type);
  return classes->is_array() && std::any_of(classes->begin(), classes->end(), [&](const json& name) {
           return name.is_string() &&
                  std::find(supported.begin(), supported.end(), name.get<std::string>()) != supported.end();
         });
}

const ModelType& type_of(const CheckedJson& file) {
  const json& type = file.require("model_type");
  const ModelType* found = find_type(file);
  TWOBP_CHECK(found != nullptr, file.origin, ": model_type ", shown(type),
              " is not supported, supported are: ", hf_models());
  TWOBP_CHECK(has_class(file, *found), file.origin, ": architectures has none that is supported of model_type ",
              shown(type), ": ", join(supported_classes(*found)));
  TWOBP_CHECK(!file.find("quantization_config"), file.origin,
              ": quantized models are not supported: save the model in float32, bfloat16 or float16");
  return *found;
}

// The ranges of the configuration's keys also apply to values from a file.
void check_ranges(const std::string& path, ModelOptions& options) {
  const SectionValues chosen = options.chosen();
  for (const Key& key : chosen.section->keys) {
    try {
      check_value("model." + key.name, key, chosen.values, chosen.section->defaults.get());
    } catch (const Error& error) {
      fail(path, ": means that ", error.what());
    }
  }
}

std::string config_path(const std::string& directory) {
  return (std::filesystem::path(directory) / kModelConfig).string();
}

}  // namespace

bool comes_with_weights(const ModelType& type, const std::string& key) {
  const auto& keys = type.options.keys;
  const auto found = std::find_if(keys.begin(), keys.end(), [&](const Key& one) { return one.name == key; });
  return found != keys.end() && !found->tunable;
}

ModelOptions read_hf_config(const std::string& directory) {
  if (is_bundle(directory)) return read_bundle(directory);
  const std::string path = config_path(directory);
  std::error_code missing;
  const bool exists = std::filesystem::exists(path, missing);
  if (std::filesystem::exists(std::filesystem::path(directory) / kAdapterConfig, missing)) {
    TWOBP_CHECK(exists, directory, ": holds an adapter (", kAdapterConfig,
                "), not a model: set model.from to the adapter's model, and model.adapter to this folder");
    fail(directory, ": holds a model and an adapter (", kAdapterConfig,
         "), which transformers adds to that model: move the adapter's files into another folder, and set "
         "model.adapter to it if you want the adapter");
  }
  TWOBP_CHECK(exists, path, hub_hint(directory), ": no such file: give a Hugging Face model directory, with ",
              kModelConfig, " and model.safetensors");
  const json root = read_json_object(path, kMaxDepth);
  const CheckedJson file{root, path};
  const ModelType& type = type_of(file);
  ModelOptions options(type.name);
  type.read_hf(file, options);
  check_ranges(path, options);
  return options;
}

bool has_layers(const std::string& config) {
  const json root = read_json_object(config, kMaxDepth);
  const CheckedJson file{root, config};
  const json* name = file.find("model_type");
  if (name == nullptr || !name->is_string()) return true;  // read_hf_config says what is wrong
  const ModelType* type = find_type(file);
  return type != nullptr && has_class(file, *type);
}

void name_classes(json& config, const std::vector<std::string>& names) {
  json& by_number = config["id2label"] = json::object();
  json& by_name = config["label2id"] = json::object();
  for (size_t number = 0; number < names.size(); ++number) {
    by_number[std::to_string(number)] = names[number];
    by_name[names[number]] = number;
  }
}

json hf_config_json(const ModelConfig& config, int64_t sequence, const std::string& dtype) {
  json out = json::object();
  std::error_code missing;
  if (!config.from.empty() && std::filesystem::exists(config_path(config.from), missing)) {
    out = read_json_object(config_path(config.from), kMaxDepth);
  }
  const ModelType& of = config.type.type();
  out.erase("dtype");  // a synonym of torch_dtype
  if (of.is_bundle) {  // a captured directory
    out["torch_dtype"] = dtype;
    return out;
  }
  out.update({{"architectures", {of.hf_class}}, {"model_type", of.hf_type}, {"torch_dtype", dtype}});
  if (config.from.empty() && config.input().kind == InputKind::kTokens) {
    // The run does not know them, and the ids that transformers takes for missing keys are other tokens here.
    out.update({{"bos_token_id", nullptr}, {"eos_token_id", nullptr}});
  }
  of.write_hf(config.type, sequence, out);
  return out;
}

}  // namespace twobp
