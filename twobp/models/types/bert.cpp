// BERT: BertForMaskedLM of transformers; encoders without its head (BertModel, also as sentence-transformers
// saves them, without "bert." before their names) and models with more heads are read, a missing head is
// made.
#include "twobp/models/bert.h"

#include <array>

#include "twobp/core/check.h"
#include "twobp/models/types/all.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr const char* kBias = "cls.predictions.bias";
constexpr const char* kDecoderBias = "cls.predictions.decoder.bias";
constexpr const char* kDecoder = "cls.predictions.decoder.weight";

void check(const ModelConfig& model) {
  TWOBP_CHECK(model.dim % model.heads == 0, "model.dim (", model.dim, ") is not divisible by model.heads (",
              model.heads, "): change one of them.");
  TWOBP_CHECK(model.kv_heads == 0 || model.kv_heads == model.heads, "model.kv_heads (", model.kv_heads,
              ") is set, but a bert has as many key-value heads as model.heads: leave it 0.");
  TWOBP_CHECK(model.head_dim == 0 || model.head_dim * model.heads == model.dim, "model.head_dim (",
              model.head_dim, ") is set, but a bert's heads are model.dim / model.heads wide: leave it 0.");
}

void fill_in(ModelConfig& config) {
  if (config.hidden == 0) config.hidden = 4 * config.dim;
  config.kv_heads = config.heads;
  config.head_dim = config.dim / config.heads;
}

GeluForm form_of(const std::string& activation) {
  return activation == "gelu_tanh" ? GeluForm::kTanh : GeluForm::kErf;
}

ModelSpec build(const ModelConfig& given, at::ScalarType dtype) {
  ModelConfig config = given;
  fill_in(config);
  BertOptions options;
  options.vocab = config.vocab;
  options.dim = config.dim;
  options.layers = config.layers;
  options.heads = config.heads;
  options.hidden = config.hidden;
  options.positions = config.positions;
  options.token_types = config.token_types;
  options.activation = form_of(config.activation);
  options.dropout = config.dropout;
  options.attention_dropout = config.attention_dropout;
  options.norm_eps = config.norm_eps;
  options.tied = config.tied;
  options.init_std = config.init_std;
  options.dtype = dtype;
  options.lora = {config.lora, config.lora_alpha, config.lora_targets};
  return bert(options);
}

// The names that transformers has for the two forms; "" if it is neither.
std::string activation_of(const std::string& name) {
  if (name == "gelu") return "gelu";
  return name == "gelu_new" || name == "gelu_pytorch_tanh" ? "gelu_tanh" : "";
}

double dropout_of(const HfSection& file, const char* key) {
  const double p = file.number(key, 0.1);
  TWOBP_CHECK(p >= 0 && p < 1, file.origin, ": ", key, " is ", p, ", not a number from 0 to below 1");
  return p;
}

void read_hf(const HfSection& file, ModelConfig& model) {
  const std::string activation = file.text("hidden_act", "gelu");
  model.activation = activation_of(activation);
  TWOBP_CHECK(!model.activation.empty(), file.origin, ": hidden_act ", shown(activation),
              " is not supported: \"gelu\", \"gelu_new\" and \"gelu_pytorch_tanh\" are");
  const std::string positions = file.text("position_embedding_type", "absolute");
  TWOBP_CHECK(positions == "absolute", file.origin, ": position_embedding_type ", shown(positions),
              " is not supported: \"absolute\" is");
  for (const char* key : {"is_decoder", "add_cross_attention"}) file.require_false(key);
  model.dim = file.integer("hidden_size", 768);
  model.layers = file.integer("num_hidden_layers", 12);
  model.heads = file.integer("num_attention_heads", 12);
  model.hidden = file.integer("intermediate_size", 3072);
  model.vocab = file.integer("vocab_size", 30522);
  model.positions = file.integer("max_position_embeddings", 512);
  model.token_types = file.integer("type_vocab_size", 2);
  model.norm_eps = file.number("layer_norm_eps", 1e-12);
  model.dropout = dropout_of(file, "hidden_dropout_prob");
  model.attention_dropout = dropout_of(file, "attention_probs_dropout_prob");
  model.tied = file.boolean("tie_word_embeddings", true);
  TWOBP_CHECK(model.heads > 0 && model.dim % model.heads == 0, file.origin, ": hidden_size ", model.dim,
              " is not divisible by num_attention_heads ", model.heads);
  TWOBP_CHECK(model.hidden > 0, file.origin, ": intermediate_size is 0");
  model.kv_heads = model.heads;
  model.head_dim = model.dim / model.heads;
}

void write_hf(const ModelConfig& given, int64_t /*sequence*/, json& out) {
  ModelConfig config = given;
  fill_in(config);
  const auto known = out.find("hidden_act");
  const bool said = known != out.end() && known->is_string() &&
                    activation_of(known->get<std::string>()) == config.activation;
  out.update({{"hidden_size", config.dim},
              {"num_hidden_layers", config.layers},
              {"num_attention_heads", config.heads},
              {"intermediate_size", config.hidden},
              {"vocab_size", config.vocab},
              {"max_position_embeddings", config.positions},
              {"type_vocab_size", config.token_types},
              {"layer_norm_eps", config.norm_eps},
              {"hidden_dropout_prob", config.dropout},
              {"attention_probs_dropout_prob", config.attention_dropout},
              {"tie_word_embeddings", config.tied},
              {"position_embedding_type", "absolute"},
              {"is_decoder", false}});
  if (!said) out["hidden_act"] = config.activation == "gelu" ? "gelu" : "gelu_pytorch_tanh";
}

std::string rename(const std::string& stored) {
  std::string name = stored;
  for (const char* folder : {"embeddings.", "encoder.", "pooler."}) {
    if (name.starts_with(folder)) {
      name = "bert." + name;
      break;
    }
  }
  // What the first release called the two vectors of a LayerNorm.
  for (const auto& [old, now] : std::array<std::pair<std::string_view, const char*>, 2>{
           {{".LayerNorm.gamma", ".LayerNorm.weight"}, {".LayerNorm.beta", ".LayerNorm.bias"}}}) {
    if (name.ends_with(old)) name = name.substr(0, name.size() - old.size()) + now;
  }
  const bool elsewhere = name == "bert.embeddings.position_ids" || name.starts_with("bert.pooler.") ||
                         name.starts_with("cls.seq_relationship.");
  return elsewhere ? "" : name;
}

}  // namespace

Architecture bert_architecture() {
  Architecture bert;
  bert.type = "bert";
  bert.input = ModelInput::kMaskedTokens;
  bert.hf_type = "bert";
  bert.hf_class = "BertForMaskedLM";
  bert.hf_others = {"BertModel", "BertForPreTraining"};
  bert.names.rename = rename;
  // transformers 5 has two biases where the decoder is not tied and uses the decoder's; else they are one.
  bert.names.same = {{kBias, kDecoderBias}};
  bert.names.may_ignore = [](const std::string& name) {
    return name == kBias || name == kDecoderBias || name == kDecoder;
  };
  bert.names.may_lack = [](const std::string& parameter) { return parameter.starts_with("cls."); };
  bert.lora = true;
  bert.reduced_precision = true;
  bert.fill_in = fill_in;
  bert.longest = [](const ModelConfig& config) { return config.positions; };
  bert.check = check;
  bert.build = build;
  bert.read_hf = read_hf;
  bert.write_hf = write_hf;
  return bert;
}

}  // namespace twobp
