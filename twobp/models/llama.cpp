#include "twobp/models/llama.h"

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "twobp/config/check_used.h"
#include "twobp/core/check.h"
#include "twobp/models/common_keys.h"
#include "twobp/models/mlp.h"
#include "twobp/models/pad_token.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/cross_entropy.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/residual.h"
#include "twobp/nn/layers/rms_norm.h"
#include "twobp/nn/layers/sequential.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr const char* kLlamaEmbedding = "model.embed_tokens.weight";
constexpr const char* kLlamaHead = "lm_head.weight";

std::vector<Key> llama_keys() {
  using O = LlamaOptions;
  return {
      TWOBP_KEY(O, dim, "width of the model").in("features").from(1, kMaxWidth),
      TWOBP_KEY(O, layers, "depth of the model").in("blocks").from(1, kMaxCount),
      TWOBP_KEY(O, heads, "query heads of attention").in("heads").from(1, kMaxCount),
      TWOBP_KEY(O, kv_heads, "key and value heads; 0: as many as heads").in("heads").from(0, kMaxCount),
      TWOBP_KEY(O, head_dim, "width of a head, even; 0: dim / heads").in("features").from(0, kMaxCount),
      TWOBP_KEY(O, hidden, "width of the MLP; 0: dim * 8 / 3 rounded up to a multiple of 64")
          .in("features")
          .from(0, 4 * kMaxWidth),
      vocab_key<O>(),
      TWOBP_KEY(O, norm_eps, "added to the mean square in RMSNorm").above(0),
      TWOBP_KEY(O, rope_theta, "base of the rotary embedding's wavelengths").in("positions").above(0),
      TWOBP_KEY(O, rope_scaling, "how the wavelengths are stretched for longer sequences")
          .one_of(rope_scaling_names()),
      TWOBP_KEY(O, rope_factor, "linear, llama3: stretching factor").above(0),
      TWOBP_KEY(O, rope_low_freq, "llama3: wavelengths above original positions / this are stretched")
          .above(0),
      TWOBP_KEY(O, rope_high_freq, "llama3: wavelengths below original positions / this are not").above(0),
      TWOBP_KEY(O, rope_original_positions, "llama3: longest sequence before the stretching")
          .in("tokens")
          .above(0),
      TWOBP_KEY(O, tied, "input and output embeddings share one matrix"),
      pad_token_key<O>(),
      init_std_key<O>(),
  };
}

LlamaOptions filled_in(LlamaOptions config) {
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  if (config.head_dim == 0) config.head_dim = config.dim / config.heads;
  config.hidden = mlp_width(config.hidden, config.dim);
  return config;
}

void check_llama(const LlamaOptions& model) {
  const LlamaOptions usual;
  const bool scales = model.rope_scaling != "none";
  const bool llama3 = model.rope_scaling == "llama3";
  const char* const by_llama3 = "model.rope_scaling \"llama3\"";
  check_used(scales, "model.rope_factor", model.rope_factor, usual.rope_factor,
             "model.rope_scaling \"linear\" or \"llama3\"");
  check_used(llama3, "model.rope_low_freq", model.rope_low_freq, usual.rope_low_freq, by_llama3);
  check_used(llama3, "model.rope_high_freq", model.rope_high_freq, usual.rope_high_freq, by_llama3);
  check_used(llama3, "model.rope_original_positions", model.rope_original_positions,
             usual.rope_original_positions, by_llama3);
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
  check_pad_token(model.pad_token, model.vocab);
}

RopeSettings rope_settings(const LlamaOptions& o) {
  return {o.rope_theta,     parse_rope_scaling(o.rope_scaling), o.rope_factor, o.rope_low_freq,
          o.rope_high_freq, o.rope_original_positions};
}

std::unique_ptr<Layer> llama_attention(const std::string& block, const LlamaOptions& o,
                                       const BuildSettings& s) {
  const std::string attention = block + ".self_attn.";
  const int64_t q_rows = o.heads * o.head_dim;
  const int64_t kv_rows = o.kv_heads * o.head_dim;
  std::vector<ParameterPart> qkv = {{attention + "q_proj.weight", q_rows},
                                    {attention + "k_proj.weight", kv_rows},
                                    {attention + "v_proj.weight", kv_rows}};
  const AttentionShape shape{o.heads, o.kv_heads, o.head_dim, rope_settings(o)};
  return std::make_unique<Residual>(make_sequential(
      std::make_unique<RmsNorm>(block + ".input_layernorm.weight", o.dim, o.norm_eps, s.dtype),
      make_linear(qkv, o.dim, o.init_std, s.dtype, s.lora), std::make_unique<Attention>(shape, s.dtype),
      make_linear({{attention + "o_proj.weight", o.dim}}, q_rows, o.init_std, s.dtype, s.lora)));
}

// config.json, with rope settings in the form of transformers version 4 (rope_theta, rope_scaling) and
// version 5 (rope_parameters). Throws Error for settings that would make another computation than ours.
void check_llama_file(const HfSection& file) {
  const std::string activation = file.text("hidden_act", "silu");
  TWOBP_CHECK(activation == "silu", file.origin, ": hidden_act ", shown(activation),
              " is not supported: \"silu\" is");
  for (const char* key : {"attention_bias", "mlp_bias"}) file.require_false(key);
  TWOBP_CHECK(file.number("attention_dropout", 0) == 0, file.origin,
              ": attention_dropout is not supported: set it to 0");
}

void read_rope(const HfSection& file, LlamaOptions& config) {
  const LlamaOptions defaults;
  config.rope_scaling = defaults.rope_scaling;
  config.rope_factor = defaults.rope_factor;
  config.rope_low_freq = defaults.rope_low_freq;
  config.rope_high_freq = defaults.rope_high_freq;
  config.rope_original_positions = defaults.rope_original_positions;
  config.rope_theta = file.number("rope_theta", defaults.rope_theta);
  // If both exist, transformers 5 uses this one.
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

void read_llama(const HfSection& file, LlamaOptions& model) {
  check_llama_file(file);
  model.dim = file.integer("hidden_size");
  model.layers = file.integer("num_hidden_layers");
  model.heads = file.integer("num_attention_heads");
  model.kv_heads = file.integer("num_key_value_heads", model.heads);
  model.hidden = file.integer("intermediate_size");
  model.vocab = file.integer("vocab_size");
  model.pad_token = read_pad_token(file, model.vocab);
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

json rope_json(const LlamaOptions& config) {
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

void write_llama(const LlamaOptions& given, int64_t sequence, json& out) {
  const LlamaOptions config = filled_in(given);
  TWOBP_CHECK(config.dim % config.heads == 0, "transformers refuses a LLaMa whose model.dim (", config.dim,
              ") is not divisible by model.heads (", config.heads,
              "), even with a model.head_dim: change one of them to save the model");
  const auto length = out.find("max_position_embeddings");
  if (length != out.end() && length->is_number_integer())
    sequence = std::max(sequence, length->get<int64_t>());
  out.erase("rope_parameters");  // a synonym of the keys below
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
  write_pad_token(config.pad_token, out);
}

TensorNames llama_names(const LlamaOptions& given) {
  const LlamaOptions o = filled_in(given);
  TensorNames names;
  if (o.tied) names.copies[kLlamaHead] = kLlamaEmbedding;
  // Early files have the frequencies of every layer. Those of a stretched embedding are the ones before the
  // stretching: at that time the positions were divided instead.
  names.derived = [o](const std::string& name) -> std::vector<at::Tensor> {
    if (!name.ends_with(".rotary_emb.inv_freq")) return {};
    RopeSettings unstretched;
    unstretched.theta = o.rope_theta;
    return {rope_frequencies(rope_settings(o), o.head_dim), rope_frequencies(unstretched, o.head_dim)};
  };
  return names;
}

}  // namespace

ModelSpec llama(const LlamaOptions& given, const BuildSettings& s) {
  TWOBP_CHECK(given.heads >= 1, "a LLaMa needs at least one head");
  const LlamaOptions o = filled_in(given);
  TWOBP_CHECK(o.layers >= 1 && o.dim >= 1 && o.vocab >= 1 && o.hidden >= 1,
              "a LLaMa needs at least one layer, dim, vocab and hidden of at least 1");
  const MlpOptions mlp_options{o.dim, o.layers, o.hidden, o.norm_eps, o.init_std};
  ModelSpec model;
  model.layers.push_back({"model.embed_tokens", "embedding", [o, s] {
                            return std::make_unique<Embedding>(kLlamaEmbedding, o.vocab, o.dim, o.init_std,
                                                               s.dtype, o.pad_token);
                          }});
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string block = "model.layers." + std::to_string(i);
    model.layers.push_back(
        {block + ".attention", "attention", [o, s, block] { return llama_attention(block, o, s); }});
    model.layers.push_back(
        {block + ".mlp", "mlp", [mlp_options, s, block] { return mlp_half(block, mlp_options, s); }});
  }
  const std::string head = o.tied ? kLlamaEmbedding : kLlamaHead;
  model.layers.push_back({"lm_head", "head", [o, s, head] {
                            return make_sequential(
                                std::make_unique<RmsNorm>("model.norm.weight", o.dim, o.norm_eps, s.dtype),
                                make_linear({{head, o.vocab}}, o.dim, o.init_std, s.dtype, s.lora),
                                std::make_unique<CrossEntropy>());
                          }});
  return model;
}

ModelType llama_type() {
  ModelType type = make_model_type<LlamaOptions>(llama_keys());
  type.hf_type = "llama";
  type.hf_class = "LlamaForCausalLM";
  type.names = [](const ModelOptions& o) { return llama_names(o.as<LlamaOptions>()); };
  type.lora = true;
  type.peft_task = "CAUSAL_LM";
  type.reduced_precision = true;
  type.input = [](const ModelOptions& o) {
    ModelInput input;
    input.vocab = o.as<LlamaOptions>().vocab;
    return input;
  };
  type.fill_in = [](ModelOptions& o) { o.as<LlamaOptions>() = filled_in(o.as<LlamaOptions>()); };
  type.check = [](const ModelOptions& o) { check_llama(o.as<LlamaOptions>()); };
  type.build = [](const ModelOptions& o, const BuildSettings& s) { return llama(o.as<LlamaOptions>(), s); };
  type.read_hf = [](const HfSection& file, ModelOptions& o) { read_llama(file, o.as<LlamaOptions>()); };
  type.write_hf = [](const ModelOptions& o, int64_t sequence, json& out) {
    write_llama(o.as<LlamaOptions>(), sequence, out);
  };
  return type;
}

}  // namespace twobp
