#include "twobp/models/hf_config.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <type_traits>
#include <variant>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/config/config_keys.h"
#include "twobp/files/json_file.h"
#include "twobp/models/architecture.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;
constexpr const char* kFile = "config.json";

const Architecture& architecture_of(const HfSection& file) {
  const json& type = file.require("model_type");
  const auto& all = architectures();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Architecture& one) {
    return !one.hf_type.empty() && type == one.hf_type;
  });
  TWOBP_CHECK(found != all.end(), file.origin, ": model_type ", shown(type),
              " is not supported, supported are: ", hf_models());
  if (const json* classes = file.find("architectures")) {
    std::vector<std::string> supported = found->hf_others;
    supported.insert(supported.begin(), found->hf_class);
    const bool any =
        classes->is_array() && std::any_of(classes->begin(), classes->end(), [&](const json& name) {
          return std::find(supported.begin(), supported.end(), name) != supported.end();
        });
    TWOBP_CHECK(any, file.origin, ": architectures has none that is supported of model_type ", shown(type),
                ": ", join(supported));
  }
  TWOBP_CHECK(!file.find("quantization_config"), file.origin,
              ": quantized models are not supported: save the model in float32, bfloat16 or float16");
  return *found;
}

// The ranges of the configuration's keys hold for what comes from a file too.
void check_ranges(const std::string& path, const ModelConfig& model) {
  Config config;
  config.model = model;
  for (const ConfigKey& key : config_keys()) {
    if (!is_architecture_key(key.full_name())) continue;
    std::visit(
        [&](const auto* value) {
          using Value = std::remove_cv_t<std::remove_pointer_t<decltype(value)>>;
          if constexpr (std::is_arithmetic_v<Value> && !std::is_same_v<Value, bool>) {
            TWOBP_CHECK(key.allowed.contains(static_cast<double>(*value)), path, ": means ", key.full_name(),
                        " ", *value, ", which must be ", key.allowed.text());
          }
        },
        key.field(config));
  }
}

std::string config_path(const std::string& directory) {
  return (std::filesystem::path(directory) / kFile).string();
}

}  // namespace

bool is_architecture_key(std::string_view name) {
  constexpr std::array<std::string_view, 6> kOthers = {"model.from",    "model.init_std",
                                                       "model.freeze",  "model.adapter",
                                                       "model.dropout", "model.attention_dropout"};
  return name.starts_with("model.") && !name.starts_with("model.lora") &&
         std::find(kOthers.begin(), kOthers.end(), name) == kOthers.end();
}

void read_hf_config(const std::string& directory, ModelConfig& config) {
  const std::string path = config_path(directory);
  std::error_code missing;
  TWOBP_CHECK(std::filesystem::exists(path, missing), path,
              ": no such file: give a Hugging Face model directory, with ", kFile, " and model.safetensors");
  const json root = read_json_object(path, kMaxDepth);
  const HfSection file{root, path};
  const Architecture& found = architecture_of(file);
  ModelConfig model = config;
  model.type = found.type;
  found.read_hf(file, model);
  check_ranges(path, model);
  config = model;
}

void fill_from_hf(ModelConfig& config, const std::set<std::string>& given) {
  Config before;
  Config after;
  before.model = after.model = config;
  read_hf_config(config.from, after.model);
  const auto value = [](const ConfigKey& key, Config& of) {
    return std::visit([](const auto* field) { return json(*field); }, key.field(of));
  };
  for (const ConfigKey& key : config_keys()) {
    const std::string name = key.full_name();
    if (!given.contains(name)) continue;
    if (name == "model.dropout") after.model.dropout = config.dropout;
    if (name == "model.attention_dropout") after.model.attention_dropout = config.attention_dropout;
    if (!is_architecture_key(name)) continue;
    // Equal is fine, so that a configuration printed in full can be read again.
    TWOBP_CHECK(value(key, before) == value(key, after), name, " is ", shown(value(key, before)),
                ", but the model in model.from has ", shown(value(key, after)),
                ": the architecture comes from ", config_path(config.from), ", so remove ", name);
  }
  config = after.model;
}

json hf_config_json(const ModelConfig& config, int64_t sequence, const std::string& dtype) {
  json out = json::object();
  std::error_code missing;
  if (!config.from.empty() && std::filesystem::exists(config_path(config.from), missing)) {
    out = read_json_object(config_path(config.from), kMaxDepth);
  }
  const Architecture& of = architecture(config.type);
  out.erase("dtype");  // the other name of torch_dtype
  out.update({{"architectures", {of.hf_class}}, {"model_type", of.hf_type}, {"torch_dtype", dtype}});
  of.write_hf(config, sequence, out);
  return out;
}

}  // namespace twobp
