#include "twobp/models/bert.h"

#include "twobp/core/check.h"
#include "twobp/nn/layers/add_norm.h"
#include "twobp/nn/layers/bert_embedding.h"
#include "twobp/nn/layers/bidirectional_attention.h"
#include "twobp/nn/layers/counted_positions.h"
#include "twobp/nn/layers/cross_entropy.h"
#include "twobp/nn/layers/gelu_linear.h"
#include "twobp/nn/layers/sequential.h"

namespace twobp {
namespace {

constexpr const char* kEmbeddings = "bert.embeddings";

std::unique_ptr<Layer> linear(const std::string& module, int64_t in, int64_t out, const BertOptions& o) {
  return make_linear({{module + ".weight", out}}, in, o.init_std, o.dtype, o.lora, /*bias=*/true);
}

std::unique_ptr<Layer> gelu_linear(const std::string& module, int64_t in, int64_t out, const BertOptions& o) {
  const std::vector<ParameterPart> parts = {{module + ".weight", out}};
  if (LoraLinear::adapts(parts, o.lora)) {
    return make_sequential(std::make_unique<Gelu>(o.activation), linear(module, in, out, o));
  }
  return std::make_unique<GeluLinear>(o.activation, parts, in, o.init_std, o.dtype, /*bias=*/true);
}

std::unique_ptr<Layer> add_norm(std::unique_ptr<Layer> branch, const std::string& output,
                                const BertOptions& o) {
  return std::make_unique<AddNorm>(std::move(branch), output + ".LayerNorm", o.dim, o.norm_eps, o.dropout,
                                   o.dtype);
}

std::unique_ptr<Layer> attention_half(const std::string& block, const BertOptions& o) {
  const std::string self = block + ".attention.self";
  const std::string output = block + ".attention.output";
  const std::vector<ParameterPart> qkv = {
      {self + ".query.weight", o.dim}, {self + ".key.weight", o.dim}, {self + ".value.weight", o.dim}};
  const BidirectionalAttentionShape shape{o.heads, o.dim / o.heads};
  return add_norm(
      make_sequential(make_linear(qkv, o.dim, o.init_std, o.dtype, o.lora, /*bias=*/true),
                      std::make_unique<BidirectionalAttention>(shape, o.attention_dropout, self, o.dtype),
                      linear(output + ".dense", o.dim, o.dim, o)),
      output, o);
}

std::unique_ptr<Layer> mlp_half(const std::string& block, const BertOptions& o) {
  return add_norm(make_sequential(linear(block + ".intermediate.dense", o.dim, o.hidden, o),
                                  gelu_linear(block + ".output.dense", o.hidden, o.dim, o)),
                  block + ".output", o);
}

std::unique_ptr<Layer> head(const BertOptions& o) {
  const std::string transform = "cls.predictions.transform";
  const std::string decoder =
      o.tied ? "bert.embeddings.word_embeddings.weight" : "cls.predictions.decoder.weight";
  const std::string bias = o.tied ? "cls.predictions.bias" : "cls.predictions.decoder.bias";
  return std::make_unique<CountedPositions>(make_sequential(
      linear(transform + ".dense", o.dim, o.dim, o), std::make_unique<Gelu>(o.activation),
      std::make_unique<LayerNorm>(transform + ".LayerNorm", o.dim, o.norm_eps, o.dtype),
      std::make_unique<Linear>(std::vector<ParameterPart>{{decoder, o.vocab}}, o.dim, o.init_std, o.dtype,
                               std::vector<ParameterPart>{{bias, o.vocab}}),
      std::make_unique<CrossEntropy>()));
}

}  // namespace

ModelSpec bert(const BertOptions& o) {
  TWOBP_CHECK(
      o.layers >= 1 && o.dim >= 1 && o.vocab >= 1 && o.hidden >= 1 && o.positions >= 1 && o.token_types >= 1,
      "a BERT needs layers, dim, vocab, hidden, positions and token types of at least 1");
  TWOBP_CHECK(o.heads >= 1 && o.dim % o.heads == 0, "a BERT's dim ", o.dim, " is not divisible by its ",
              o.heads, " heads");
  for (const double p : {o.dropout, o.attention_dropout}) {
    TWOBP_CHECK(p >= 0 && p < 1, "a BERT's dropout ", p, " is not in [0, 1)");
  }
  ModelSpec model;
  model.layers.push_back({kEmbeddings, "embedding", [o] {
                            const BertEmbeddingShape shape{o.vocab, o.positions, o.token_types, o.dim};
                            return std::make_unique<BertEmbedding>(kEmbeddings, shape, o.norm_eps, o.dropout,
                                                                   o.init_std, o.dtype);
                          }});
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string block = "bert.encoder.layer." + std::to_string(i);
    model.layers.push_back(
        {block + ".attention", "attention", [o, block] { return attention_half(block, o); }});
    model.layers.push_back({block + ".mlp", "mlp", [o, block] { return mlp_half(block, o); }});
  }
  model.layers.push_back({"cls", "head", [o] { return head(o); }});
  return model;
}

}  // namespace twobp
