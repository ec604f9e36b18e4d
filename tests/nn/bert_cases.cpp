// BERT's layers without dropout, in small odd sizes and in sizes of several blocks. They run through all tests that
// cover every layer.
#include "tests/nn/bert_reference.h"
#include "tests/nn/layer_cases.h"
#include "tests/nn/reference.h"
#include "twobp/models/models.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/losses.h"
#include "twobp/nn/layers/norms.h"

namespace twobp::test {
namespace {

using Weights = std::vector<at::Tensor>;

constexpr double kStd = 0.5;
constexpr double kEps = 0.25;  // large enough to matter; smooth enough for finite differences

auto sizes(std::vector<int64_t> per_sample) {
  return [per_sample](int64_t samples) {
    std::vector<int64_t> out = {samples};
    out.insert(out.end(), per_sample.begin(), per_sample.end());
    return out;
  };
}

// Each sample has padding of another length at its end. The first position is real.
at::Tensor padding_mask(int64_t samples, int64_t positions, uint64_t seed) {
  at::Tensor mask = at::ones({samples, positions}, at::kLong);
  for (int64_t b = 0; b < samples; ++b) {
    const int64_t real = 1 + (static_cast<int64_t>(seed) + 2 * b) % positions;
    mask[b].narrow(0, real, positions - real).zero_();
  }
  return mask;
}

LayerCase biased_linear_case(const std::string& name, int64_t positions, int64_t in,
                             const std::vector<ParameterPart>& parts) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return std::make_unique<Linear>(parts, in, kStd, dtype, /*bias=*/true); };
  c.input = sizes({positions, in});
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) { return reference::affine(x, w[0], w[1]); };
  int64_t out = 0;
  for (const auto& part : parts) out += part.rows;
  c.roundings = static_cast<double>(std::max({3 * positions, out, in + 1}));
  return c;
}

LayerCase layer_norm_case(const std::string& name, int64_t positions, int64_t dim) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return std::make_unique<LayerNorm>("n", dim, kEps, dtype); };
  c.input = sizes({positions, dim});
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) {
    return reference::layer_norm(x, w[0], w[1], kEps);
  };
  // The mean and the variance sum dim numbers each. The gain's gradient sums rows up to a block of 64, and then blocks.
  // About 16 more operations are involved.
  c.roundings = static_cast<double>(std::max<int64_t>(2 * dim, 64)) + 20;
  return c;
}

LayerCase gelu_case(const std::string& name, GeluForm form, int64_t positions, int64_t dim) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType) { return std::make_unique<Gelu>(form); };
  c.input = sizes({positions, dim});
  c.reference = [=](const at::Tensor& x, const Weights&, const Fields&) { return reference::gelu(x, form); };
  c.roundings = 40;  // erf, exp within 4 ulp (8 roundings) of numbers up to 4, and fewer than 16 operations
  return c;
}

LayerCase gelu_linear_case(const std::string& name, GeluForm form, bool bias, int64_t positions, int64_t in,
                           int64_t out) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    return std::make_unique<GeluLinear>(form, std::vector<ParameterPart>{{"w", out}}, in, kStd, dtype, bias);
  };
  c.input = sizes({positions, in});
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields&) {
    const at::Tensor y = reference::linear(reference::gelu(x, form), w[0]);
    return bias ? y + w[1] : y;
  };
  c.roundings = static_cast<double>(std::max({3 * positions, out, in})) + 40;
  return c;
}

LayerCase add_norm_case(const std::string& name, int64_t positions, int64_t dim) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    auto branch = std::make_unique<Linear>(std::vector<ParameterPart>{{"w", dim}}, dim, kStd, dtype);
    return std::make_unique<AddNorm>(std::move(branch), "n", dim, kEps, /*dropout=*/0, dtype);
  };
  c.input = sizes({positions, dim});
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) {
    return reference::layer_norm(x + reference::linear(x, w[0]), w[1], w[2], kEps);
  };
  c.roundings = static_cast<double>(std::max<int64_t>(4 * dim, 64) + 3 * positions) + 20;
  return c;
}

LayerCase attention_case(const std::string& name, const BidirectionalAttentionShape& shape, int64_t positions,
                         bool padded) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    return std::make_unique<BidirectionalAttention>(shape, /*dropout=*/0, "a", dtype);
  };
  c.input = sizes({positions, 3 * shape.width()});
  if (padded) {
    c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) {
      return Fields{{"attention_mask", padding_mask(samples, positions, seed)}};
    };
  }
  c.reference = [=](const at::Tensor& x, const Weights&, const Fields& fields) {
    return reference::bidirectional_attention(x, shape, padded ? fields.at("attention_mask") : at::Tensor());
  };
  // Scores (D), softmax and its sum (S), and values (S), and all of them again in the backward pass. exp is within 4
  // ulp of scores up to 8. About 20 more operations are involved.
  c.roundings = static_cast<double>(2 * shape.head_dim + 4 * positions) + 60;
  return c;
}

LayerCase embedding_case(const std::string& name, const BertEmbeddingShape& shape, int64_t positions, bool typed) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    return std::make_unique<BertEmbedding>("e", shape, kEps, /*dropout=*/0, kStd, dtype);
  };
  c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) {
    Fields fields = {{"input_ids", random_ids({samples, positions}, shape.vocab, seed)}};
    if (typed) fields["token_type_ids"] = random_ids({samples, positions}, shape.types, seed + 9);
    return fields;
  };
  c.reference = [=](const at::Tensor&, const Weights& w, const Fields& fields) {
    const at::Tensor& ids = fields.at("input_ids");
    const at::Tensor types = typed ? fields.at("token_type_ids") : at::zeros_like(ids);
    const at::Tensor sum = at::embedding(w[0], ids) + at::embedding(w[2], types) + w[1].narrow(0, 0, positions);
    return reference::layer_norm(sum, w[3], w[4], kEps);
  };
  c.roundings = static_cast<double>(std::max<int64_t>(2 * shape.dim, 64) + 3 * positions) + 24;
  return c;
}

Fields labelled(int64_t samples, int64_t positions, int64_t vocab, uint64_t seed) {
  at::Tensor labels = random_ids({samples, positions}, vocab, seed);
  labels.masked_fill_(random_ids({samples, positions}, 3, seed + 3).ne(0), kIgnoreLabel);
  labels.view({-1})[0].fill_(1);  // at least one counts
  return {{"labels", labels}};
}

constexpr double kLossWeight = 0.25;

LayerCase counted_case(const std::string& name, int64_t positions, int64_t dim, int64_t vocab) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    return std::make_unique<CountedPositions>(
        make_sequential(std::make_unique<Linear>(std::vector<ParameterPart>{{"w", vocab}}, dim, kStd, dtype, true),
                        std::make_unique<CrossEntropy>()));
  };
  c.input = sizes({positions, dim});
  c.loss_weight = kLossWeight;
  c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) { return labelled(samples, positions, vocab, seed); };
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields& fields) {
    return reference::cross_entropy(reference::affine(x, w[0], w[1]), fields.at("labels"), kLossWeight);
  };
  c.roundings = static_cast<double>(2 * vocab + 2 * dim + 3 * positions) + 40;
  return c;
}

BertOptions options(int64_t dim, int64_t heads, int64_t hidden) {
  BertOptions o;
  o.vocab = 23;
  o.dim = dim;
  o.layers = 1;
  o.heads = heads;
  o.hidden = hidden;
  o.norm_eps = kEps;
  o.init_std = kStd;
  o.tied = true;
  return o;
}

LayerCase attention_half_case(const std::string& name, int64_t positions, int64_t dim, int64_t heads) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return bert(options(dim, heads, 2), {dtype, {}}).layers[1].make(); };
  c.input = sizes({positions, dim});
  c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) {
    return Fields{{"attention_mask", padding_mask(samples, positions, seed)}};
  };
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields& fields) {
    const at::Tensor out = reference::bidirectional_attention(reference::affine(x, w[0], w[1]), {heads, dim / heads},
                                                              fields.at("attention_mask"));
    return reference::layer_norm(x + reference::affine(out, w[2], w[3]), w[4], w[5], kEps);
  };
  c.roundings = static_cast<double>(12 * dim + 8 * positions) + 200;
  return c;
}

LayerCase mlp_half_case(const std::string& name, int64_t positions, int64_t dim, int64_t hidden) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return bert(options(dim, 1, hidden), {dtype, {}}).layers[2].make(); };
  c.input = sizes({positions, dim});
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) {
    const at::Tensor act = reference::gelu(reference::affine(x, w[0], w[1]), GeluForm::kErf);
    return reference::layer_norm(x + reference::affine(act, w[2], w[3]), w[4], w[5], kEps);
  };
  c.roundings = static_cast<double>(6 * dim + 4 * hidden + 3 * positions) + 150;
  return c;
}

LayerCase head_case(const std::string& name, int64_t positions, int64_t dim) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return bert(options(dim, 1, 2), {dtype, {}}).layers.back().make(); };
  c.input = sizes({positions, dim});
  c.loss_weight = kLossWeight;
  c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) { return labelled(samples, positions, 23, seed); };
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields& fields) {
    const at::Tensor act = reference::gelu(reference::affine(x, w[0], w[1]), GeluForm::kErf);
    const at::Tensor normed = reference::layer_norm(act, w[2], w[3], kEps);
    return reference::cross_entropy(reference::affine(normed, w[4], w[5]), fields.at("labels"), kLossWeight);
  };
  c.roundings = static_cast<double>(10 * dim + 4 * 23 + 3 * positions) + 200;
  return c;
}

INSTANTIATE_TEST_SUITE_P(
    Bert, EveryLayer,
    testing::Values(
        biased_linear_case("LinearBias", 3, 5, {{"w.weight", 7}}),
        biased_linear_case("LinearBiasPacked", 3, 5, {{"q", 4}, {"k", 1}, {"v", 2}}),
        biased_linear_case("LinearBiasLarge", 65, 67, {{"w", 71}}),  // blocks of 64, 64 and 2 rows
        layer_norm_case("LayerNorm", 3, 5), layer_norm_case("LayerNormWholeBlocks", 64, 17),
        layer_norm_case("LayerNormLarge", 65, 33), layer_norm_case("LayerNormWide", 3, 1100),
        gelu_case("GeluErf", GeluForm::kErf, 3, 5), gelu_case("GeluTanh", GeluForm::kTanh, 3, 5),
        gelu_case("GeluErfLarge", GeluForm::kErf, 65, 137), gelu_case("GeluTanhLarge", GeluForm::kTanh, 65, 137),
        gelu_linear_case("GeluLinear", GeluForm::kErf, true, 3, 5, 7),
        gelu_linear_case("GeluLinearTanh", GeluForm::kTanh, false, 3, 5, 7),
        gelu_linear_case("GeluLinearLarge", GeluForm::kErf, true, 65, 33, 31), add_norm_case("AddNorm", 3, 5),
        add_norm_case("AddNormLarge", 65, 33), attention_case("BidirectionalAttention", {2, 4}, 3, false),
        attention_case("BidirectionalAttentionPadded", {2, 3}, 5, true),
        attention_case("BidirectionalAttentionOnePosition", {2, 3}, 1, false),
        attention_case("BidirectionalAttentionLarge", {3, 18}, 133, true),  // blocks of 128 and 5 queries
        embedding_case("BertEmbedding", {4, 7, 2, 5}, 7, true),             // 14 tokens from 4 values: repeated
        embedding_case("BertEmbeddingUntyped", {131, 70, 3, 33}, 65, false), counted_case("CountedPositions", 3, 5, 7),
        counted_case("CountedPositionsLarge", 65, 17, 33), attention_half_case("BertAttentionHalf", 5, 6, 2),
        attention_half_case("BertAttentionHalfLarge", 65, 36, 3), mlp_half_case("BertMlpHalf", 3, 5, 7),
        mlp_half_case("BertMlpHalfLarge", 65, 33, 71), head_case("BertHead", 3, 5), head_case("BertHeadLarge", 65, 33)),
    [](const testing::TestParamInfo<LayerCase>& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::test
