// LLaMa: LlamaForCausalLM of transformers, with rope settings as version 4 (rope_theta, rope_scaling) and 5
// (rope_parameters) write them.
#include "twobp/models/llama.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/models/types/all.h"

namespace twobp {
namespace {

using nlohmann::json;

void check(const ModelConfig& model) {
  TWOBP_CHECK(model.head_dim > 0 || model.dim % model.heads == 0, "model.dim (", model.dim,
              ") is not divisible by model.heads (", model.heads,
              "): change one of them, or set model.head_dim.");
  TWOBP_CHECK(model.kv_heads == 0 || model.heads % model.kv_heads == 0, "model.kv_heads (", model.kv_heads,
              ") does not divide model.heads (", model.heads,
              "): every key-value head serves as many query heads.");
  TWOBP_CHECK(model.rope_scaling != "llama3" || model.rope_low_freq < model.rope_high_freq,
              "model.rope_low_freq (", model.rope_low_freq, ") is not below model.rope_high_freq (",
              model.rope_high_freq, "): frequencies between them are mixed.");
  const int64_t head_dim = model.head_dim > 0 ? model.head_dim : model.dim / model.heads;
  TWOBP_CHECK(
      head_dim % 2 == 0, model.head_dim > 0 ? "model.head_dim" : "model.dim / model.heads", " (", head_dim,
      ") is odd: the rotary embedding turns pairs of features, so a head needs an even number of them.");
}

void fill_in(ModelConfig& config) {
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  if (config.head_dim == 0) config.head_dim = config.dim / config.heads;
  config.hidden = mlp_width(config.hidden, config.dim);
}

ModelSpec build(const ModelConfig& given, at::ScalarType dtype) {
  ModelConfig config = given;
  fill_in(config);
  LlamaOptions options;
  options.vocab = config.vocab;
  options.dim = config.dim;
  options.layers = config.layers;
  options.heads = config.heads;
  options.kv_heads = config.kv_heads;
  options.head_dim = config.head_dim;
  options.hidden = config.hidden;
  options.norm_eps = config.norm_eps;
  options.rope = {config.rope_theta,     parse_rope_scaling(config.rope_scaling),
                  config.rope_factor,    config.rope_low_freq,
                  config.rope_high_freq, config.rope_original_positions};
  options.tied = config.tied;
  options.init_std = config.init_std;
  options.dtype = dtype;
  options.lora = {config.lora, config.lora_alpha, config.lora_targets};
  return llama(options);
}

// What would be computed otherwise than the file says.
void check_supported(const HfSection& file) {
  const std::string activation = file.text("hidden_act", "silu");
  TWOBP_CHECK(activation == "silu", file.origin, ": hidden_act ", shown(activation),
              " is not supported: \"silu\" is");
  for (const char* key : {"attention_bias", "mlp_bias"}) file.require_false(key);
  TWOBP_CHECK(file.number("attention_dropout", 0) == 0, file.origin,
              ": attention_dropout is not supported: set it to 0");
}

void read_rope(const HfSection& file, ModelConfig& config) {
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
  const HfSection rope{settings ? *settings : file.object,
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

void read_hf(const HfSection& file, ModelConfig& model) {
  check_supported(file);
  model.dim = file.integer("hidden_size");
  model.layers = file.integer("num_hidden_layers");
  model.heads = file.integer("num_attention_heads");
  model.kv_heads = file.integer("num_key_value_heads", model.heads);
  model.hidden = file.integer("intermediate_size");
  model.vocab = file.integer("vocab_size");
  model.norm_eps = file.number("rms_norm_eps", 1e-6);
  model.tied = file.boolean("tie_word_embeddings", false);
  TWOBP_CHECK(file.find("head_dim") || (model.heads > 0 && model.dim % model.heads == 0), file.origin,
              ": hidden_size ", model.dim, " is not divisible by num_attention_heads ", model.heads,
              ", and head_dim is not given");
  model.head_dim = file.find("head_dim") ? file.integer("head_dim") : model.dim / model.heads;
  read_rope(file, model);
  TWOBP_CHECK(model.kv_heads > 0 && model.heads % model.kv_heads == 0, file.origin, ": num_key_value_heads ",
              model.kv_heads, " does not divide num_attention_heads ", model.heads);
  TWOBP_CHECK(model.head_dim > 0 && model.head_dim % 2 == 0, file.origin, ": head_dim ", model.head_dim,
              " is not supported: it must be even, since the rotary embedding turns pairs");
  TWOBP_CHECK(model.hidden > 0, file.origin, ": intermediate_size is 0");
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

void write_hf(const ModelConfig& given, int64_t sequence, json& out) {
  ModelConfig config = given;
  fill_in(config);
  const auto length = out.find("max_position_embeddings");
  if (length != out.end() && length->is_number_integer())
    sequence = std::max(sequence, length->get<int64_t>());
  out.erase("rope_parameters");  // the other way to say what is said below
  out.update({{"hidden_size", config.dim},
              {"num_hidden_layers", config.layers},
              {"num_attention_heads", config.heads},
              {"num_key_value_heads", config.kv_heads},
              {"head_dim", config.head_dim},
              {"intermediate_size", config.hidden},
              {"vocab_size", config.vocab},
              {"rms_norm_eps", config.norm_eps},
              {"rope_theta", config.rope_theta},
              {"rope_scaling", rope_json(config)},
              {"tie_word_embeddings", config.tied},
              {"max_position_embeddings", sequence},
              {"hidden_act", "silu"},
              {"attention_bias", false},
              {"mlp_bias", false}});
}

}  // namespace

Architecture llama_architecture() {
  Architecture llama;
  llama.type = "llama";
  llama.input = ModelInput::kTokens;
  llama.hf_type = "llama";
  llama.hf_class = "LlamaForCausalLM";
  llama.lora = true;
  llama.reduced_precision = true;
  llama.fill_in = fill_in;
  llama.check = check;
  llama.build = build;
  llama.read_hf = read_hf;
  llama.write_hf = write_hf;
  return llama;
}

}  // namespace twobp
