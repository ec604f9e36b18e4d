// Properties of single layers: repeated tokens, causality, sequences of other lengths, labels that do not count.
#include <cmath>

#include "tests/nn/layer_test_util.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/losses.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

// The numbers are integers, so that sums are exact in any order.
TEST(EmbeddingFacts, GradientsOfRepeatedTokensAddUp) {
  Embedding layer("e", 4, 3, 1, at::kFloat);
  const auto parameters = make_parameters(layer);
  const at::Tensor ids = at::tensor({2, 0, 2, 2, 0, 3}, at::kLong).view({2, 3});
  MicroBatch micro_batch(layer, {{"input_ids", ids}});
  const at::Tensor y = micro_batch.forward({});
  EXPECT_TRUE(same_bits(y[0][0], parameters[0]->value[2]));
  EXPECT_TRUE(same_bits(y[1][2], parameters[0]->value[3]));
  at::Tensor dy = at::arange(18, at::kFloat).view({2, 3, 3});
  EXPECT_FALSE(micro_batch.p1(dy).defined()) << "the first layer gives no input gradient";
  micro_batch.p2();
  const at::Tensor rows = dy.view({6, 3});
  const at::Tensor& grad = parameters[0]->grad;
  EXPECT_TRUE(same_bits(grad[0], rows[1] + rows[4]));
  EXPECT_TRUE(same_bits(grad[1], at::zeros({3})));
  EXPECT_TRUE(same_bits(grad[2], rows[0] + rows[2] + rows[3]));
  EXPECT_TRUE(same_bits(grad[3], rows[5]));
}

// PyTorch computes the same gradient with a padding_idx.
TEST(EmbeddingFacts, ThePaddingTokenHasNoGradient) {
  const at::Tensor ids = at::tensor({2, 0, 2, 2, 0, 3}, at::kLong).view({2, 3});
  const at::Tensor dy = at::arange(1, 19, at::kFloat).view({2, 3, 3});
  const auto gradient = [&](int64_t padding) {
    Embedding layer("e", 4, 3, 1, at::kFloat, padding);
    const auto parameters = make_parameters(layer);
    MicroBatch micro_batch(layer, {{"input_ids", ids}});
    micro_batch.forward({});
    micro_batch.p1(dy.clone());
    micro_batch.p2();
    return parameters[0]->grad.clone();
  };
  for (const int64_t padding : {-1, 0, 2, 1}) {
    const at::Tensor expected = at::embedding_dense_backward(dy, ids, 4, padding, false);
    EXPECT_TRUE(same_bits(gradient(padding), expected)) << padding;
    const OperatorsEverywhere operators;
    EXPECT_TRUE(same_bits(gradient(padding), expected)) << padding << ", by operators";
  }
}

const AttentionShape kShape{4, 2, 6, 10000};

// A position sees itself and earlier positions. So later numbers neither change its output nor get a gradient from it.
TEST(AttentionFacts, NothingComesFromTheFuture) {
  Attention layer(kShape, at::kFloat);
  const at::Tensor x = random({2, 9, kShape.packed()}, 1, at::kFloat);
  at::Tensor other = x.clone();
  other.narrow(1, 5, 4).add_(1);
  MicroBatch micro_batch(layer);
  const at::Tensor y = micro_batch.forward(x);
  const at::Tensor y_other = MicroBatch(layer).evaluate(other);
  EXPECT_TRUE(same_bits(y.narrow(1, 0, 5), y_other.narrow(1, 0, 5)));
  EXPECT_FALSE(same_bits(y.narrow(1, 5, 1), y_other.narrow(1, 5, 1)));
  at::Tensor dy = random(y.sizes(), 2, at::kFloat);
  dy.narrow(1, 5, 4).zero_();
  const at::Tensor dx = micro_batch.p1(dy);
  EXPECT_EQ(largest(dx.narrow(1, 5, 4)), 0);
  EXPECT_GT(largest(dx.narrow(1, 4, 1)), 0);
}

// Position 0 is not rotated and sees only itself. Its output is its v, which the queries of a group share.
TEST(AttentionFacts, FirstPositionGivesItsOwnValue) {
  Attention layer(kShape, at::kDouble);
  const at::Tensor x = random({1, 3, kShape.packed()}, 1);
  const at::Tensor y = MicroBatch(layer).evaluate(x).select(1, 0).view({kShape.heads, kShape.head_dim});
  const at::Tensor v = x.select(1, 0).narrow(1, 6 * 6, 2 * 6).view({2, 6});
  for (int64_t head = 0; head < kShape.heads; ++head) {
    expect_close(y[head], v[head / 2], 2, at::kDouble, "head " + std::to_string(head));
  }
}

// Longer sequences between F and I enlarge the rotation tables. The angles of positions must not change.
TEST(AttentionFacts, SequencesOfDifferentLengths) {
  const at::Tensor x = random({2, 3, kShape.packed()}, 1, at::kFloat);
  const at::Tensor dy = random({2, 3, kShape.heads * kShape.head_dim}, 2, at::kFloat);
  Attention alone(kShape, at::kFloat);
  MicroBatch expected(alone);
  const at::Tensor y = expected.forward(x).clone();
  const at::Tensor dx = expected.p1(dy);
  Attention layer(kShape, at::kFloat);
  MicroBatch micro_batch(layer);
  MicroBatch longer(layer);
  EXPECT_TRUE(same_bits(micro_batch.forward(x), y));
  const at::Tensor long_y = longer.forward(random({1, 11, kShape.packed()}, 3, at::kFloat));
  EXPECT_TRUE(same_bits(micro_batch.p1(dy), dx));
  EXPECT_EQ(longer.p1(long_y).sizes(), (std::vector<int64_t>{1, 11, kShape.packed()}));
  EXPECT_TRUE(same_bits(MicroBatch(layer).evaluate(x), y)) << "the longer tables give the same numbers";
}

TEST(CrossEntropyFacts, NothingCounted) {
  CrossEntropy layer;
  MicroBatch micro_batch(layer, {{"labels", at::full({2, 3}, kIgnoreLabel, at::kLong)}});
  EXPECT_EQ(micro_batch.forward(random({2, 3, 7}, 1, at::kFloat)).item<double>(), 0);
  EXPECT_EQ(largest(micro_batch.p1({})), 0);
}

// With equal logits, every counted position costs log(V). Its gradient is 1 / V, minus 1 at the label, times the scale.
// Positions that do not count add nothing and do not change the others.
TEST(CrossEntropyFacts, ScaleAndIgnoredLabels) {
  CrossEntropy layer;
  at::Tensor labels = at::tensor({3, 0, -100}, at::kLong).view({1, 3});
  MicroBatch micro_batch(layer, {{"labels", labels}}, 0, 0.125);
  const at::Tensor loss = micro_batch.forward(at::full({1, 3, 8}, 2.5, at::kFloat));
  EXPECT_EQ(loss.scalar_type(), at::kDouble);
  EXPECT_NEAR(loss.item<double>(), 2 * std::log(8.0) * 0.125, 4e-16);
  const at::Tensor expected = at::full({1, 3, 8}, 0.125 / 8, at::kFloat);
  expected[0][0][3] = 0.125 / 8 - 0.125;
  expected[0][1][0] = 0.125 / 8 - 0.125;
  expected[0][2].zero_();
  EXPECT_TRUE(same_bits(micro_batch.p1({}), expected));  // powers of two: exact
}

TEST(CrossEntropyFacts, EvaluationCountsRightPredictions) {
  CrossEntropy layer;
  const at::Tensor labels = at::tensor({2, 0, -100, 1}, at::kLong);
  const Fields fields = {{"labels", labels}};
  Context context;
  context.fields = &fields;
  context.training = false;
  at::Tensor logits = at::zeros({4, 3});
  logits[0][2] = logits[1][1] = logits[2][0] = logits[3][1] = 5;  // right, wrong, not counted, right
  Saved saved;
  const Values out = layer.forward({logits}, context, saved);
  ASSERT_EQ(out.size(), 2U);
  EXPECT_EQ(out[1].item<int64_t>(), 2);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
