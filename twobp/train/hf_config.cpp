#include "twobp/train/hf_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <type_traits>
#include <variant>

#include "twobp/core/check.h"
#include "twobp/train/build_model.h"
#include "twobp/train/config_keys.h"
#include "twobp/train/json_file.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;
constexpr const char* kFile = "config.json";
constexpr const char* kModelType = "llama";
constexpr const char* kArchitecture = "LlamaForCausalLM";

std::string shown(const json& value) {
  constexpr size_t kLongest = 100;
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

// An object of the file. A key that is null counts as missing, as in transformers.
struct Section {
  const json& object;
  std::string origin;

  const json* find(const char* key) const {
    const auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }
  const json& require(const char* key) const {
    const json* value = find(key);
    TWOBP_CHECK(value, origin, ": has no ", key);
    return *value;
  }

  int64_t integer(const char* key) const {
    const json& value = require(key);
    // What does not fit is larger than anything sensible anyway; the ranges are checked later.
    TWOBP_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX, origin, ": ", key, " is ",
                shown(value), ", not an integer from 0");
    return value.get<int64_t>();
  }
  int64_t integer(const char* key, int64_t otherwise) const { return find(key) ? integer(key) : otherwise; }

  double number(const char* key) const {
    const json& value = require(key);
    TWOBP_CHECK(value.is_number(), origin, ": ", key, " is ", shown(value), ", not a number");
    return value.get<double>();
  }
  double number(const char* key, double otherwise) const { return find(key) ? number(key) : otherwise; }

  bool boolean(const char* key, bool otherwise) const {
    const json* value = find(key);
    TWOBP_CHECK(!value || value->is_boolean(), origin, ": ", key, " is ", shown(*value),
                ", not true or false");
    return value ? value->get<bool>() : otherwise;
  }

  std::string text(const char* key, const std::string& otherwise) const {
    const json* value = find(key);
    TWOBP_CHECK(!value || value->is_string(), origin, ": ", key, " is ", shown(*value), ", not a text");
    return value ? value->get<std::string>() : otherwise;
  }
};

// What would be computed otherwise than the file says.
void check_supported(const Section& file) {
  const json& type = file.require("model_type");
  TWOBP_CHECK(type == kModelType, file.origin, ": model_type ", shown(type), " is not supported: \"",
              kModelType, "\" is");
  if (const json* architectures = file.find("architectures")) {
    TWOBP_CHECK(
        architectures->is_array() &&
            std::find(architectures->begin(), architectures->end(), kArchitecture) != architectures->end(),
        file.origin, ": architectures has no \"", kArchitecture, "\", the only one that is supported");
  }
  const std::string activation = file.text("hidden_act", "silu");
  TWOBP_CHECK(activation == "silu", file.origin, ": hidden_act ", shown(activation),
              " is not supported: \"silu\" is");
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    TWOBP_CHECK(!file.boolean(key, false), file.origin, ": ", key, " true is not supported: false is");
  }
  TWOBP_CHECK(file.number("attention_dropout", 0) == 0, file.origin,
              ": attention_dropout is not supported: set it to 0");
  TWOBP_CHECK(!file.find("quantization_config"), file.origin,
              ": quantized models are not supported: save the model in float32, bfloat16 or float16");
}

void read_rope(const Section& file, ModelConfig& config) {
  const ModelConfig defaults;
  config.rope_scaling = defaults.rope_scaling;
  config.rope_factor = defaults.rope_factor;
  config.rope_low_freq = defaults.rope_low_freq;
  config.rope_high_freq = defaults.rope_high_freq;
  config.rope_original_positions = defaults.rope_original_positions;
  config.rope_theta = file.number("rope_theta", defaults.rope_theta);
  // If both are there, transformers 5 takes this one.
  const char* key = file.find("rope_scaling") ? "rope_scaling" : "rope_parameters";
  const json* settings = file.find(key);
  TWOBP_CHECK(!settings || settings->is_object(), file.origin, ": ", key, " is ", shown(*settings),
              ", not an object");
  const Section rope{settings ? *settings : file.object,
                     settings ? concat(file.origin, ": ", key) : file.origin};
  TWOBP_CHECK(rope.number("partial_rotary_factor", file.number("partial_rotary_factor", 1)) == 1, rope.origin,
              ": a partial_rotary_factor other than 1 is not supported");
  if (!settings) return;
  config.rope_theta = rope.number("rope_theta", config.rope_theta);
  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  if (type == "default") return;
  TWOBP_CHECK(type == "linear" || type == "llama3", rope.origin, ": rope_type ", shown(type),
              " is not supported: default, linear and llama3 are");
  config.rope_scaling = type;
  config.rope_factor = rope.number("factor");
  if (type == "linear") return;
  config.rope_low_freq = rope.number("low_freq_factor");
  config.rope_high_freq = rope.number("high_freq_factor");
  config.rope_original_positions = rope.number("original_max_position_embeddings");
  TWOBP_CHECK(config.rope_low_freq < config.rope_high_freq, rope.origin,
              ": low_freq_factor must be below high_freq_factor");
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
  TWOBP_CHECK(model.kv_heads > 0 && model.heads % model.kv_heads == 0, path, ": num_key_value_heads ",
              model.kv_heads, " does not divide num_attention_heads ", model.heads);
  TWOBP_CHECK(model.head_dim > 0 && model.head_dim % 2 == 0, path, ": head_dim ", model.head_dim,
              " is not supported: it must be even, since the rotary embedding turns pairs");
  TWOBP_CHECK(model.hidden > 0, path, ": intermediate_size is 0");
}

json rope_json(const ModelConfig& config) {
  if (config.rope_scaling == "none") return nullptr;
  json rope = {{"rope_type", config.rope_scaling}, {"factor", config.rope_factor}};
  if (config.rope_scaling == "llama3") {
    rope["low_freq_factor"] = config.rope_low_freq;
    rope["high_freq_factor"] = config.rope_high_freq;
    const double positions = config.rope_original_positions;
    rope["original_max_position_embeddings"] = positions == std::floor(positions) && positions < 0x1p53
                                                   ? json(static_cast<int64_t>(positions))
                                                   : json(positions);
  }
  return rope;
}

std::string config_path(const std::string& directory) {
  return (std::filesystem::path(directory) / kFile).string();
}

}  // namespace

bool is_architecture_key(std::string_view name) {
  constexpr std::array<std::string_view, 4> kOthers = {"model.from", "model.init_std", "model.freeze",
                                                       "model.adapter"};
  return name.starts_with("model.") && !name.starts_with("model.lora") &&
         std::find(kOthers.begin(), kOthers.end(), name) == kOthers.end();
}

void read_hf_config(const std::string& directory, ModelConfig& config) {
  const std::string path = config_path(directory);
  std::error_code missing;
  TWOBP_CHECK(std::filesystem::exists(path, missing), path,
              ": no such file: give a Hugging Face model directory, with ", kFile, " and model.safetensors");
  const json root = read_json_object(path, kMaxDepth);
  const Section file{root, path};
  check_supported(file);
  ModelConfig model = config;
  model.type = kModelType;
  model.dim = file.integer("hidden_size");
  model.layers = file.integer("num_hidden_layers");
  model.heads = file.integer("num_attention_heads");
  model.kv_heads = file.integer("num_key_value_heads", model.heads);
  model.hidden = file.integer("intermediate_size");
  model.vocab = file.integer("vocab_size");
  model.norm_eps = file.number("rms_norm_eps", 1e-6);
  model.tied = file.boolean("tie_word_embeddings", false);
  TWOBP_CHECK(file.find("head_dim") || (model.heads > 0 && model.dim % model.heads == 0), path,
              ": hidden_size ", model.dim, " is not divisible by num_attention_heads ", model.heads,
              ", and head_dim is not given");
  model.head_dim = file.find("head_dim") ? file.integer("head_dim") : model.dim / model.heads;
  read_rope(file, model);
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
    if (!is_architecture_key(name) || !given.contains(name)) continue;
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
  const auto length = out.find("max_position_embeddings");
  if (length != out.end() && length->is_number_integer())
    sequence = std::max(sequence, length->get<int64_t>());
  out.erase("rope_parameters");  // the other ways to say what is said below
  out.erase("dtype");
  out.update({{"architectures", {kArchitecture}},
              {"model_type", kModelType},
              {"hidden_size", config.dim},
              {"num_hidden_layers", config.layers},
              {"num_attention_heads", config.heads},
              {"num_key_value_heads", config.kv_heads > 0 ? config.kv_heads : config.heads},
              {"head_dim", config.head_dim > 0 ? config.head_dim : config.dim / config.heads},
              {"intermediate_size", mlp_width(config)},
              {"vocab_size", config.vocab},
              {"rms_norm_eps", config.norm_eps},
              {"rope_theta", config.rope_theta},
              {"rope_scaling", rope_json(config)},
              {"tie_word_embeddings", config.tied},
              {"max_position_embeddings", sequence},
              {"hidden_act", "silu"},
              {"attention_bias", false},
              {"mlp_bias", false},
              {"torch_dtype", dtype}});
  return out;
}

}  // namespace twobp
