// Reads BertForMaskedLM of transformers, encoders without its head (BertModel, also as sentence-transformers saves
// them, without "bert." in their names), and models with additional heads. A missing head starts as in a new model.
#include <array>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/models/models.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/losses.h"
#include "twobp/nn/layers/norms.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr const char* kBias = "cls.predictions.bias";
constexpr const char* kDecoderBias = "cls.predictions.decoder.bias";
constexpr const char* kDecoder = "cls.predictions.decoder.weight";
constexpr const char* kWords = "bert.embeddings.word_embeddings.weight";
constexpr const char* kPositionIds = "bert.embeddings.position_ids";

void check_bert(const BertOptions& model) {
  TWOBP_CHECK(model.dim % model.heads == 0, "model.dim (", model.dim, ") is not divisible by model.heads (",
              model.heads, "): change one of them.");
  check_pad_token(model.pad_token, model.vocab);
}

BertOptions filled_in(BertOptions config) {
  if (config.hidden == 0) config.hidden = 4 * config.dim;
  return config;
}

// The options together with the build settings.
struct Bert : BertOptions {
  at::ScalarType dtype;
  LoraOptions lora;

  GeluForm gelu() const { return activation == "gelu_tanh" ? GeluForm::kTanh : GeluForm::kErf; }
};

constexpr const char* kEmbeddings = "bert.embeddings";

std::unique_ptr<Layer> bert_linear(const std::string& module, int64_t in, int64_t out, const Bert& o) {
  return make_linear({{module + ".weight", out}}, in, o.init_std, o.dtype, o.lora, /*bias=*/true);
}

std::unique_ptr<Layer> bert_gelu_linear(const std::string& module, int64_t in, int64_t out, const Bert& o) {
  const std::vector<ParameterPart> parts = {{module + ".weight", out}};
  if (LoraLinear::adapts(parts, o.lora)) {
    return make_sequential(std::make_unique<Gelu>(o.gelu()), bert_linear(module, in, out, o));
  }
  return std::make_unique<GeluLinear>(o.gelu(), parts, in, o.init_std, o.dtype, /*bias=*/true);
}

std::unique_ptr<Layer> bert_add_norm(std::unique_ptr<Layer> branch, const std::string& output, const Bert& o) {
  return std::make_unique<AddNorm>(std::move(branch), output + ".LayerNorm", o.dim, o.norm_eps, o.dropout, o.dtype);
}

std::unique_ptr<Layer> bert_attention(const std::string& block, const Bert& o) {
  const std::string self = block + ".attention.self";
  const std::string output = block + ".attention.output";
  const std::vector<ParameterPart> qkv = {
      {self + ".query.weight", o.dim}, {self + ".key.weight", o.dim}, {self + ".value.weight", o.dim}};
  const BidirectionalAttentionShape shape{o.heads, o.dim / o.heads};
  return bert_add_norm(
      make_sequential(make_linear(qkv, o.dim, o.init_std, o.dtype, o.lora, /*bias=*/true),
                      std::make_unique<BidirectionalAttention>(shape, o.attention_dropout, self, o.dtype),
                      bert_linear(output + ".dense", o.dim, o.dim, o)),
      output, o);
}

std::unique_ptr<Layer> bert_mlp(const std::string& block, const Bert& o) {
  return bert_add_norm(make_sequential(bert_linear(block + ".intermediate.dense", o.dim, o.hidden, o),
                                       bert_gelu_linear(block + ".output.dense", o.hidden, o.dim, o)),
                       block + ".output", o);
}

std::unique_ptr<Layer> bert_head(const Bert& o) {
  const std::string transform = "cls.predictions.transform";
  const std::string decoder = o.tied ? kWords : kDecoder;
  const std::string bias = o.tied ? kBias : kDecoderBias;
  return std::make_unique<CountedPositions>(
      make_sequential(bert_linear(transform + ".dense", o.dim, o.dim, o), std::make_unique<Gelu>(o.gelu()),
                      std::make_unique<LayerNorm>(transform + ".LayerNorm", o.dim, o.norm_eps, o.dtype),
                      std::make_unique<Linear>(std::vector<ParameterPart>{{decoder, o.vocab}}, o.dim, o.init_std,
                                               o.dtype, std::vector<ParameterPart>{{bias, o.vocab}}),
                      std::make_unique<CrossEntropy>()));
}

// The activation's name in our options; "" if it is neither of the two forms.
std::string activation_of(const std::string& name) {
  if (name == "gelu") return "gelu";
  return name == "gelu_new" || name == "gelu_pytorch_tanh" ? "gelu_tanh" : "";
}

double dropout_of(const CheckedJson& file, const char* key) {
  const double p = file.number(key, 0.1);
  TWOBP_CHECK(p >= 0 && p < 1, file.origin, ": ", key, " is ", p, ", not a number from 0 to below 1");
  return p;
}

void read_bert(const CheckedJson& file, BertOptions& model) {
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
  model.pad_token = read_pad_token(file, model.vocab, /*otherwise=*/0);
  model.norm_eps = file.number("layer_norm_eps", 1e-12);
  model.dropout = dropout_of(file, "hidden_dropout_prob");
  model.attention_dropout = dropout_of(file, "attention_probs_dropout_prob");
  model.tied = file.boolean("tie_word_embeddings", true);
  TWOBP_CHECK(model.heads > 0 && model.dim % model.heads == 0, file.origin, ": hidden_size ", model.dim,
              " is not divisible by num_attention_heads ", model.heads);
  TWOBP_CHECK(model.hidden > 0, file.origin, ": intermediate_size is 0");
}

void write_bert(const BertOptions& given, json& out) {
  const BertOptions config = filled_in(given);
  const auto known = out.find("hidden_act");
  const bool said =
      known != out.end() && known->is_string() && activation_of(known->get<std::string>()) == config.activation;
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
  write_pad_token(config.pad_token, out);
}

std::string rename_bert(const std::string& stored) {
  std::string name = stored;
  for (const char* folder : {"embeddings.", "encoder.", "pooler."}) {
    if (name.starts_with(folder)) {
      name = "bert." + name;
      break;
    }
  }
  // The first release's names of a LayerNorm's two vectors.
  for (const auto& [old, now] : std::array<std::pair<std::string_view, const char*>, 2>{
           {{".LayerNorm.gamma", ".LayerNorm.weight"}, {".LayerNorm.beta", ".LayerNorm.bias"}}}) {
    if (name.ends_with(old)) name = name.substr(0, name.size() - old.size()) + now;
  }
  const bool elsewhere = name.starts_with("bert.pooler.") || name.starts_with("cls.seq_relationship.");
  return elsewhere ? "" : name;
}

TensorNames bert_names(const BertOptions& o) {
  TensorNames names;
  names.rename = rename_bert;
  // If the decoder is not tied, transformers 5 has two biases and uses the decoder's. Otherwise they are one.
  names.same = {{kBias, kDecoderBias}};
  if (o.tied) {
    names.copies = {{kDecoder, kWords}, {kDecoderBias, kBias}};
  } else {
    names.unused = {kBias};
  }
  names.derived = [positions = o.positions](const std::string& name) -> std::vector<at::Tensor> {
    if (name != kPositionIds) return {};
    return {at::arange(positions)};
  };
  names.may_lack = [](const std::string& parameter) { return parameter.starts_with("cls."); };
  return names;
}

std::vector<Key> bert_keys() {
  using O = BertOptions;
  return {
      TWOBP_KEY(O, dim, "width of the model").in("features").from(1, kMaxWidth),
      TWOBP_KEY(O, layers, "depth of the model").in("blocks").from(1, kMaxCount),
      TWOBP_KEY(O, heads, "query heads of attention").in("heads").from(1, kMaxCount),
      TWOBP_KEY(O, hidden, "width of the MLP; 0: 4 * dim").in("features").from(0, 4 * kMaxWidth),
      vocab_key<O>(),
      TWOBP_KEY(O, norm_eps, "added to the variance in LayerNorm").above(0),
      TWOBP_KEY(O, tied, "input and output embeddings share one matrix"),
      pad_token_key<O>(),
      TWOBP_KEY(O, positions, "the longest sequence, each position with an embedding of its own")
          .in("tokens")
          .from(1, kMaxLength),
      TWOBP_KEY(O, token_types, "kinds of tokens, such as those of two sentences").from(1, kMaxCount),
      TWOBP_KEY(O, activation, "activation of the MLP").one_of({"gelu", "gelu_tanh"}),
      dropout_key(TWOBP_KEY(O, dropout, "dropout probability after the embeddings and after each half of a block")),
      dropout_key(TWOBP_KEY(O, attention_dropout, "dropout probability of attention's probabilities")),
      init_std_key<O>(),
  };
}

}  // namespace

ModelSpec bert(const BertOptions& options, const BuildSettings& settings) {
  const Bert o{filled_in(options), settings.dtype, settings.lora};
  TWOBP_CHECK(o.layers >= 1 && o.dim >= 1 && o.vocab >= 1 && o.hidden >= 1 && o.positions >= 1 && o.token_types >= 1,
              "a BERT needs layers, dim, vocab, hidden, positions and token types of at least 1");
  TWOBP_CHECK(o.heads >= 1 && o.dim % o.heads == 0, "a BERT's dim ", o.dim, " is not divisible by its ", o.heads,
              " heads");
  for (const double p : {o.dropout, o.attention_dropout}) {
    TWOBP_CHECK(p >= 0 && p < 1, "a BERT's dropout ", p, " is not in [0, 1)");
  }
  ModelSpec model;
  model.layers.push_back({kEmbeddings, "embedding", [o] {
                            const BertEmbeddingShape shape{o.vocab, o.positions, o.token_types, o.dim, o.pad_token};
                            return std::make_unique<BertEmbedding>(kEmbeddings, shape, o.norm_eps, o.dropout,
                                                                   o.init_std, o.dtype);
                          }});
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string block = "bert.encoder.layer." + std::to_string(i);
    model.layers.push_back({block + ".attention", "attention", [o, block] { return bert_attention(block, o); }});
    model.layers.push_back({block + ".mlp", "mlp", [o, block] { return bert_mlp(block, o); }});
  }
  model.layers.push_back({"cls", "head", [o] { return bert_head(o); }});
  return model;
}

ModelType bert_type() {
  ModelType type = make_model_type<BertOptions>(bert_keys());
  type.hf_type = "bert";
  type.hf_class = "BertForMaskedLM";
  type.hf_others = {"BertModel", "BertForPreTraining"};
  type.names = [](const ModelOptions& o) { return bert_names(o.as<BertOptions>()); };
  type.lora = true;
  type.reduced_precision = true;
  type.input = [](const ModelOptions& o) {
    ModelInput input;
    input.kind = InputKind::kMaskedTokens;
    input.vocab = o.as<BertOptions>().vocab;
    input.token_types = o.as<BertOptions>().token_types;
    input.longest = o.as<BertOptions>().positions;
    return input;
  };
  type.fill_in = [](ModelOptions& o) { o.as<BertOptions>() = filled_in(o.as<BertOptions>()); };
  type.check = [](const ModelOptions& o) { check_bert(o.as<BertOptions>()); };
  type.build = [](const ModelOptions& o, const BuildSettings& s) { return bert(o.as<BertOptions>(), s); };
  type.no_graph = [](const ModelOptions&) {
    return std::string("its head sees the positions to be predicted, other ones every time");
  };
  type.read_hf = [](const CheckedJson& file, ModelOptions& o) { read_bert(file, o.as<BertOptions>()); };
  type.write_hf = [](const ModelOptions& o, int64_t /*sequence*/, json& out) { write_bert(o.as<BertOptions>(), out); };
  return type;
}

}  // namespace twobp
