// Tests dropout's masks: their scale, their dependencies, and evaluation without masks. In BERT's layers, forward and
// backward must use the same mask.
#include <cmath>
#include <set>

#include <ATen/Parallel.h>

#include "tests/nn/bert_reference.h"
#include "tests/nn/layer_test_util.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/norms.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

constexpr double kProbability = 0.3;

struct Draw {
  uint64_t seed = 1;
  int64_t step = 2;
  int64_t micro_batch = 3;
};

Context context_of(const Draw& draw, const Fields* fields = nullptr) {
  Context context;
  context.fields = fields;
  context.seed = draw.seed;
  context.step = draw.step;
  context.micro_batch = draw.micro_batch;
  return context;
}

// Applies dropout to `x` (..., cols), with the rows split over threads.
at::Tensor drop(const at::Tensor& x, const DropoutRate& rate, const Context& context) {
  at::Tensor y = at::empty_like(x);
  const int64_t cols = x.size(-1);
  for_rows(x.numel() / cols, cols,
           [&](int64_t begin, int64_t end) { dropout_rows(x, {}, y, cols, rate.mask(context), begin, end); });
  return y;
}

// The factor of each number in (rows, cols).
at::Tensor mask_of(const std::string& name, std::vector<int64_t> sizes, const Draw& draw = {},
                   double probability = kProbability, at::ScalarType dtype = at::kDouble) {
  return drop(at::ones(sizes, dtype), DropoutRate(probability, name), context_of(draw));
}

TEST(Dropout, KeepsTheMean) {
  for (const double p : {0.1, 0.3, 0.5, 0.9}) {
    const int64_t n = 1 << 20;
    const at::Tensor mask = mask_of("layer", {n / 1024, 1024}, {}, p);
    const double kept = mask.ne(0).sum().item<double>() / static_cast<double>(n);
    // Five standard deviations of a mean of n numbers, plus half a step of the probability.
    const double error = 5 * std::sqrt(p * (1 - p) / static_cast<double>(n));
    EXPECT_NEAR(kept, 1 - p, error + 0x1p-17) << p;
    EXPECT_NEAR(mask.max().item<double>(), 1 / (1 - p), 0x1p-17 / ((1 - p) * (1 - p)) * 1.01) << p;
    EXPECT_NEAR(mask.mean().item<double>(), 1, error / (1 - p)) << p;
  }
}

TEST(Dropout, RowsAndColumnsAreIndependent) {
  const at::Tensor dropped = mask_of("layer", {2048, 1000}).eq(0).to(at::kDouble);
  const auto within = [](const at::Tensor& means, double n, const char* what) {
    const double error = 6 * std::sqrt(kProbability * (1 - kProbability) / n);  // over several thousand means
    EXPECT_LT((means - kProbability).abs().max().item<double>(), error) << what;
  };
  within(dropped.mean(0), 2048, "columns");
  within(dropped.mean(1), 1000, "rows");
  // Two neighbours are both dropped with the square of the probability.
  const double both = kProbability * kProbability;
  for (const auto& [down, right] : std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 0}, {0, 500}, {8, 8}}) {
    const at::Tensor here = dropped.narrow(0, 0, 2048 - down).narrow(1, 0, 1000 - right);
    const at::Tensor there = dropped.narrow(0, down, 2048 - down).narrow(1, right, 1000 - right);
    const double n = static_cast<double>(here.numel());
    EXPECT_NEAR((here * there).mean().item<double>(), both, 5 * std::sqrt(both * (1 - both) / n))
        << down << " " << right;
  }
}

TEST(Dropout, DependsOnSeedStepMicroBatchAndName) {
  const std::vector<int64_t> sizes = {7, 33};
  const at::Tensor mask = mask_of("layer", sizes);
  EXPECT_TRUE(same_bits(mask_of("layer", sizes), mask));
  EXPECT_FALSE(same_bits(mask_of("other", sizes), mask));
  EXPECT_FALSE(same_bits(mask_of("layer", sizes, {2, 2, 3}), mask));
  EXPECT_FALSE(same_bits(mask_of("layer", sizes, {1, 3, 3}), mask));
  EXPECT_FALSE(same_bits(mask_of("layer", sizes, {1, 2, 4}), mask));
  EXPECT_FALSE(same_bits(mask_of("layer", sizes, {1, 3, 2}), mask)) << "step and micro-batch swapped";
}

TEST(Dropout, IsNothingInEvaluationAndForProbabilityZero) {
  const at::Tensor x = random({5, 9}, 1, at::kFloat);
  Context context = context_of({});
  const DropoutRate rate(kProbability, "layer"), none(0, "layer");
  EXPECT_TRUE(rate.active(context));
  EXPECT_FALSE(none.active(context));
  EXPECT_TRUE(same_bits(drop(x, none, context), x));
  context.training = false;
  EXPECT_FALSE(rate.active(context));
  EXPECT_TRUE(same_bits(drop(x, rate, context), x));
}

TEST(Dropout, MaskIsTheSameInEveryPrecision) {
  const std::vector<int64_t> sizes = {5, 1500};  // more columns than one draw provides
  const at::Tensor mask = mask_of("layer", sizes);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    EXPECT_TRUE(same_bits(mask_of("layer", sizes, {}, kProbability, dtype), mask.to(dtype)));
  }
}

TEST(Dropout, ThreadsDoNotChangeABit) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not see the barriers of the OpenMP inside LibTorch";
#endif
  const int threads = at::get_num_threads();
  std::vector<at::Tensor> masks;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    masks.push_back(mask_of("layer", {201, 515}));
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(same_bits(masks[1], masks[0]));
  EXPECT_TRUE(same_bits(masks[2], masks[0]));
}

TEST(Dropout, ProbabilityOutOfRange) {
  expect_error([] { DropoutRate(1, "layer"); }, {"dropout of layer", "[0, 1)"});
  expect_error([] { DropoutRate(-0.1, "layer"); }, {"dropout of layer", "-0.1"});
  expect_error([] { DropoutRate(std::nan(""), "layer"); }, {"dropout of layer", "nan"});
}

// Compares a layer in training with autograd of a reference that uses the same mask: y, dx and the parameters'
// gradients.
void expect_autograd(Layer& layer, const at::Tensor& x, const Fields& fields,
                     const std::function<at::Tensor(const at::Tensor&, const std::vector<at::Tensor>&)>& reference) {
  const auto parameters = make_parameters(layer);
  Context context = context_of({}, &fields);
  Saved saved;
  Values in;
  if (x.defined()) in.push_back(x.clone());
  const at::Tensor y = layer.forward(std::move(in), context, saved)[0].clone();
  const at::Tensor dy = random(y.sizes(), 4);
  const Values dx = layer.backward_p1({dy.clone()}, context, saved);
  std::vector<P2Unit> units;
  layer.collect_p2(saved, units);
  for (const P2Unit& unit : units) unit.layer->backward_p2({&unit.saved, 1});
  const at::Tensor leaf = x.defined() ? x.clone().requires_grad_(true) : x;
  std::vector<at::Tensor> weights;
  for (const Parameter* parameter : parameters) weights.push_back(parameter->value.clone().requires_grad_(true));
  const at::Tensor expected = reference(leaf, weights);
  expected.backward(dy);
  constexpr double kRoundings = 2000;
  expect_close(y, expected.detach(), kRoundings, at::kDouble, "y");
  if (x.defined()) expect_close(dx[0], leaf.grad(), kRoundings, at::kDouble, "dx");
  for (size_t i = 0; i < weights.size(); ++i) {
    expect_close(parameters[i]->grad, weights[i].grad(), kRoundings, at::kDouble, parameters[i]->name());
    EXPECT_GT(largest(weights[i].grad()), 0) << parameters[i]->name();
  }
}

constexpr double kEps = 0.25;

TEST(Dropout, InAddNormAgreesWithAutograd) {
  for (const int64_t positions : {3, 65}) {
    AddNorm layer(std::make_unique<Linear>(std::vector<ParameterPart>{{"w", 33}}, 33, 0.5, at::kDouble, true), "n", 33,
                  kEps, kProbability, at::kDouble);
    const at::Tensor mask = mask_of("n.dropout", {2, positions, 33});
    expect_autograd(layer, random({2, positions, 33}, 3), {},
                    [&](const at::Tensor& x, const std::vector<at::Tensor>& w) {
                      const at::Tensor branch = reference::affine(x, w[0], w[1]);
                      return reference::layer_norm(x + branch * mask, w[2], w[3], kEps);
                    });
  }
}

TEST(Dropout, InBertEmbeddingAgreesWithAutograd) {
  BertEmbedding layer("e", {11, 70, 2, 33}, kEps, kProbability, 0.5, at::kDouble);
  const at::Tensor ids = random_ids({2, 65}, 11, 1);
  const at::Tensor types = random_ids({2, 65}, 2, 2);
  const at::Tensor mask = mask_of("e.dropout", {2, 65, 33});
  expect_autograd(layer, {}, {{"input_ids", ids}, {"token_type_ids", types}},
                  [&](const at::Tensor&, const std::vector<at::Tensor>& w) {
                    const at::Tensor sum =
                        at::embedding(w[0], ids) + at::embedding(w[2], types) + w[1].narrow(0, 0, 65);
                    return reference::layer_norm(sum, w[3], w[4], kEps) * mask;
                  });
}

// With equal scores and the identity as values, the output shows which probabilities were kept.
at::Tensor kept_probabilities(BidirectionalAttention& layer, const BidirectionalAttentionShape& shape, int64_t batch,
                              int64_t positions) {
  at::Tensor packed = at::zeros({batch, positions, 3, shape.heads, shape.head_dim}, at::kDouble);
  for (int64_t s = 0; s < positions; ++s) packed.select(1, s).select(1, 2).select(2, s).fill_(1);
  Context context = context_of({});
  Saved saved;
  const at::Tensor y = layer.forward({packed.view({batch, positions, -1})}, context, saved)[0];
  return y.view({batch, positions, shape.heads, shape.head_dim}).transpose(1, 2).narrow(3, 0, positions) *
         static_cast<double>(positions);
}

TEST(Dropout, OfAttentionAgreesWithAutograd) {
  for (const int64_t positions : {5, 133}) {  // blocks of 128 and 5 queries
    for (const bool padded : {false, true}) {
      const BidirectionalAttentionShape shape{2, positions + 1};
      BidirectionalAttention layer(shape, kProbability, "a", at::kDouble);
      const at::Tensor kept = kept_probabilities(layer, shape, 2, positions);
      const double share = kept.eq(0).to(at::kDouble).mean().item<double>();
      EXPECT_NEAR(share, kProbability, 5 * std::sqrt(0.21 / static_cast<double>(kept.numel())));
      Fields fields;
      at::Tensor mask;
      if (padded) {
        mask = at::ones({2, positions}, at::kLong);
        mask[1].narrow(0, 3, positions - 3).zero_();
        fields["attention_mask"] = mask;
      }
      expect_autograd(layer, random({2, positions, 3 * shape.width()}, 3), fields,
                      [&](const at::Tensor& x, const std::vector<at::Tensor>&) {
                        return reference::bidirectional_attention(x, shape, mask, kept);
                      });
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
