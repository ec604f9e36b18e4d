// Compares the live bytes of every layer and of a block after F, I and W with counts by hand, and checks which tensors
// are overwritten in place. y and dx are dropped at once, so that only tensors that the layer keeps are counted.
#include "tests/nn/layer_test_util.h"
#include "tests/nn/typed_options.h"
#include "twobp/models/decoder/family.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/losses.h"
#include "twobp/nn/layers/norms.h"
#include "twobp/nn/layers/squared_error.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

constexpr int64_t kBatch = 2;
constexpr int64_t kPositions = 5;
constexpr int64_t kRows = kBatch * kPositions;

// Numbers (of 4 bytes) that are kept at three moments, and the maximum that I allocates in addition (including x and
// dy).
struct Numbers {
  int64_t after_forward = 0;
  int64_t after_p1 = 0;
  int64_t p1_extra = -1;  // -1: not checked
};

void expect_numbers(Layer& layer, std::vector<int64_t> input, std::vector<int64_t> output, const Fields& fields,
                    const Numbers& expected) {
  make_parameters(layer);
  MicroBatch micro_batch(layer, fields);
  const auto make_input = [&] { return input.empty() ? at::Tensor() : random(input, 1, at::kFloat); };
  micro_batch.evaluate(make_input());  // creates the rope tables, which are made only once
  LiveBytes bytes;
  at::Tensor x = make_input();
  micro_batch.forward(std::move(x));
  EXPECT_EQ(bytes.now(), 4 * expected.after_forward) << "after F";
  at::Tensor dy = output.empty() ? at::Tensor() : random(output, 2, at::kFloat);
  const int64_t before = bytes.now();
  bytes.restart_peak();
  micro_batch.p1(std::move(dy));
  if (expected.p1_extra >= 0) {
    EXPECT_EQ(bytes.peak() - before, 4 * expected.p1_extra) << "most in I";
  }
  EXPECT_EQ(bytes.now(), 4 * expected.after_p1) << "after I";
  micro_batch.p2();
  EXPECT_EQ(bytes.now(), 0) << "after W";
}

TEST(Memory, LinearKeepsInputAndOutputGradient) {
  Linear layer({{"w", 7}}, 3, 1, at::kFloat);
  expect_numbers(layer, {kBatch, kPositions, 3}, {kBatch, kPositions, 7}, {},
                 {kRows * 3, kRows * 3 + kRows * 7, kRows * 3});
}

// dx overwrites dy. In addition there is the gain's gradient, once per block of 64 rows and once as a sum.
TEST(Memory, RmsNormKeepsNothingAfterI) {
  RmsNorm layer("g", 6, 1e-5, at::kFloat);
  expect_numbers(layer, {kBatch, kPositions, 6}, {kBatch, kPositions, 6}, {}, {kRows * 6 + kRows, 0, 6 + 6});
}

// dx overwrites x.
TEST(Memory, SwiGluNeedsNoRoomForItsGradient) {
  GatedUnit layer(Gate::kSilu);
  expect_numbers(layer, {kBatch, kPositions, 2 * 7}, {kBatch, kPositions, 7}, {}, {kRows * 2 * 7, 0, 0});
}

TEST(Memory, AttentionKeepsProjectionsOutputAndLogSums) {
  const AttentionShape shape{4, 2, 6, 10000};
  Attention layer(shape, at::kFloat);
  expect_numbers(layer, {kBatch, kPositions, shape.packed()}, {kBatch, kPositions, 4 * 6}, {},
                 {kRows * shape.packed() + kRows * 4 * 6 + kRows * 4, 0});
}

TEST(Memory, EmbeddingKeepsOutputGradient) {
  Embedding layer("e", 11, 3, 1, at::kFloat);
  expect_numbers(layer, {}, {kBatch, kPositions, 3}, {{"input_ids", random_ids({kBatch, kPositions}, 11, 1)}},
                 {0, kRows * 3, 0});
}

// The gradient overwrites the logits.
TEST(Memory, CrossEntropyHoldsOneTensorOfLogits) {
  CrossEntropy layer;
  expect_numbers(layer, {kBatch, kPositions, 11}, {}, {{"labels", random_ids({kBatch, kPositions}, 11, 1)}},
                 {kRows * 11, 0, 0});
}

TEST(Memory, SquaredErrorKeepsTheDifference) {
  SquaredError layer;
  expect_numbers(layer, {kBatch, kPositions, 3}, {}, {{"target", random({kBatch, kPositions, 3}, 1, at::kFloat)}},
                 {kRows * 3, 0, 0});
}

test::Typed<DecoderOptions> options() {
  test::Typed<DecoderOptions> o;
  o.vocab = 11;
  o.dim = 10;
  o.layers = 1;
  o.heads = 4;
  o.kv_heads = 2;
  o.head_dim = 6;
  o.hidden = 14;
  return o;
}

// After F: the residual stream and its norm's scale, the norm's output (for W), q k v, the attention's output (one
// tensor for I and W) and its log-sums. After I, for W: the norm's output, dL/d(q k v), the attention's output, dL/dy.
TEST(Memory, AttentionHalfOfABlock) {
  const test::Typed<DecoderOptions> o = options();
  const int64_t packed = (o.heads + 2 * o.kv_heads) * o.head_dim;
  const int64_t out = o.heads * o.head_dim;
  const auto layer = llama(o, o.settings()).layers[1].make();
  expect_numbers(*layer, {kBatch, kPositions, o.dim}, {kBatch, kPositions, o.dim}, {},
                 {kRows * (o.dim + 1 + o.dim + packed + out + o.heads), kRows * (o.dim + packed + out + o.dim)});
}

// After F: the residual stream and its norm's scale, the norm's output, gate and up, and their product. After I, the
// gradient of gate and up overwrites them.
TEST(Memory, MlpHalfOfABlock) {
  const test::Typed<DecoderOptions> o = options();
  const auto layer = llama(o, o.settings()).layers[2].make();
  expect_numbers(
      *layer, {kBatch, kPositions, o.dim}, {kBatch, kPositions, o.dim}, {},
      {kRows * (o.dim + 1 + o.dim + 2 * o.hidden + o.hidden), kRows * (o.dim + 2 * o.hidden + o.hidden + o.dim)});
}

TEST(Memory, Head) {
  const test::Typed<DecoderOptions> o = options();
  const auto layer = llama(o, o.settings()).layers.back().make();
  expect_numbers(*layer, {kBatch, kPositions, o.dim}, {}, {{"labels", random_ids({kBatch, kPositions}, o.vocab, 1)}},
                 {kRows * (o.dim + 1 + o.dim + o.vocab), kRows * (o.dim + o.vocab)});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
