// Properties of BERT's layers only: padding, positions, counted labels, saved bytes, parameters and their names, bad
// input.
#include <cmath>
#include <set>

#include "tests/nn/layer_test_util.h"
#include "tests/nn/typed_options.h"
#include "twobp/models/models.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/losses.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

const BidirectionalAttentionShape kShape{2, 6};

at::Tensor mask_of(const std::vector<int64_t>& lengths, int64_t positions) {
  at::Tensor mask = at::zeros({static_cast<int64_t>(lengths.size()), positions}, at::kLong);
  for (size_t b = 0; b < lengths.size(); ++b) mask[static_cast<int64_t>(b)].narrow(0, 0, lengths[b]).fill_(1);
  return mask;
}

// Real positions do not depend on the padding: neither their outputs nor their gradients. Padding gets no gradient
// through the keys.
TEST(BidirectionalAttention, PaddingIsNotSeen) {
  BidirectionalAttention layer(kShape, 0, "a", at::kDouble);
  const at::Tensor x = random({1, 9, 3 * kShape.width()}, 1);
  MicroBatch padded(layer, {{"attention_mask", mask_of({5}, 9)}});
  MicroBatch alone(layer);
  const at::Tensor y = padded.forward(x);
  const at::Tensor expected = alone.forward(x.narrow(1, 0, 5).contiguous());
  expect_close(y.narrow(1, 0, 5), expected, 200, at::kDouble, "y");
  at::Tensor dy = random(y.sizes(), 2);
  dy.narrow(1, 5, 4).zero_();
  const at::Tensor dx = padded.p1(dy);
  expect_close(dx.narrow(1, 0, 5), alone.p1(dy.narrow(1, 0, 5).contiguous()), 200, at::kDouble, "dx");
  EXPECT_EQ(largest(dx.narrow(1, 5, 4)), 0);
}

TEST(BidirectionalAttention, SeesBothDirections) {
  BidirectionalAttention layer(kShape, 0, "a", at::kFloat);
  const at::Tensor x = random({1, 9, 3 * kShape.width()}, 1, at::kFloat);
  at::Tensor other = x.clone();
  other.narrow(1, 8, 1).add_(1);
  const at::Tensor y = MicroBatch(layer).evaluate(x);
  const at::Tensor y_other = MicroBatch(layer).evaluate(other);
  for (int64_t s = 0; s < 9; ++s) {
    EXPECT_FALSE(same_bits(y.narrow(1, s, 1), y_other.narrow(1, s, 1))) << "position " << s;
  }
}

TEST(BidirectionalAttention, MaskOfOnesIsNoMask) {
  BidirectionalAttention layer(kShape, 0, "a", at::kFloat);
  const at::Tensor x = random({2, 9, 3 * kShape.width()}, 1, at::kFloat);
  MicroBatch masked(layer, {{"attention_mask", at::ones({2, 9}, at::kLong)}});
  EXPECT_TRUE(same_bits(masked.evaluate(x), MicroBatch(layer).evaluate(x)));
}

// If no position can be attended to, any finite result is allowed. The other sample must be unaffected.
TEST(BidirectionalAttention, ASampleMayBeAllPadding) {
  BidirectionalAttention layer(kShape, 0, "a", at::kFloat);
  const at::Tensor x = random({2, 9, 3 * kShape.width()}, 1, at::kFloat);
  MicroBatch micro_batch(layer, {{"attention_mask", mask_of({0, 9}, 9)}});
  const at::Tensor y = micro_batch.forward(x);
  EXPECT_TRUE(y.isfinite().all().item<bool>());
  EXPECT_TRUE(micro_batch.p1(random(y.sizes(), 2, at::kFloat)).isfinite().all().item<bool>());
  expect_close(y[1], MicroBatch(layer).evaluate(x)[1], 100, at::kFloat, "the other sample");
}

TEST(BidirectionalAttention, MaskOfAnotherShape) {
  BidirectionalAttention layer(kShape, 0, "a", at::kFloat);
  const at::Tensor x = random({2, 9, 3 * kShape.width()}, 1, at::kFloat);
  const auto with = [&](const at::Tensor& mask) {
    expect_error(
        [&] {
          MicroBatch(layer, {{"attention_mask", mask}}).evaluate(x);
        },
        {"attention_mask must be int64 (2, 9)"});
  };
  with(at::ones({2, 8}, at::kLong));
  with(at::ones({1, 9}, at::kLong));
  with(at::ones({2, 9}, at::kFloat));
  with(at::ones({18}, at::kLong));
}

// The norm rounds, so the gradients are not whole numbers. The expected ones are sums over rows of the sum's gradient,
// which the layer saves.
TEST(BertEmbedding, GradientsOfRepeatedTokensPositionsAndTypesAddUp) {
  BertEmbedding layer("e", {5, 4, 2, 3}, 1e-12, 0, 1, at::kDouble);
  const auto parameters = make_parameters(layer);
  const at::Tensor ids = at::tensor({2, 0, 2, 2, 0, 3}, at::kLong).view({2, 3});
  const at::Tensor types = at::tensor({0, 1, 1, 0, 0, 1}, at::kLong).view({2, 3});
  MicroBatch micro_batch(layer, {{"input_ids", ids}, {"token_type_ids", types}});
  const at::Tensor y = micro_batch.forward({});
  EXPECT_FALSE(micro_batch.p1(random(y.sizes(), 1)).defined()) << "the first layer gives no input gradient";
  const at::Tensor rows = micro_batch.saved.p2(1).clone().view({6, 3});
  micro_batch.p2();
  const at::Tensor& words = parameters[0]->grad;
  expect_close(words[2], rows[0] + rows[2] + rows[3], 4, at::kDouble, "repeated token");
  expect_close(words[0], rows[1] + rows[4], 4, at::kDouble, "token");
  EXPECT_EQ(largest(words[1]) + largest(words[4]), 0) << "no sample has these tokens";
  expect_close(parameters[1]->grad[2], rows[2] + rows[5], 4, at::kDouble, "position");
  EXPECT_EQ(largest(parameters[1]->grad[3]), 0) << "a position beyond the sequence";
  expect_close(parameters[2]->grad[1], rows[1] + rows[2] + rows[5], 4, at::kDouble, "type");
}

// Only the word's row has no gradient. The position and the type of a padding token are trained, as in transformers.
TEST(BertEmbedding, ThePaddingTokenHasNoGradient) {
  const at::Tensor ids = at::tensor({2, 0, 2, 2, 0, 3}, at::kLong).view({2, 3});
  const auto gradients = [&](int64_t padding) {
    BertEmbedding layer("e", {5, 4, 2, 3, padding}, 1e-12, 0, 1, at::kDouble);
    const auto parameters = make_parameters(layer);
    MicroBatch micro_batch(layer, {{"input_ids", ids}});
    micro_batch.p1(random(micro_batch.forward({}).sizes(), 1));
    micro_batch.p2();
    std::vector<at::Tensor> all;
    for (int i = 0; i < 3; ++i) all.push_back(parameters[i]->grad.clone());
    return all;
  };
  const auto expect_padding = [&] {
    const auto plain = gradients(-1);
    const auto padded = gradients(2);
    EXPECT_GT(largest(plain[0][2]), 0);
    EXPECT_EQ(largest(padded[0][2]), 0);
    plain[0][2].zero_();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(padded[i], plain[i])) << i;
  };
  expect_padding();
  const OperatorsEverywhere operators;
  expect_padding();
}

TEST(BertEmbedding, BadInput) {
  BertEmbedding layer("e", {5, 4, 2, 3}, 1e-12, 0, 1, at::kFloat);
  make_parameters(layer);
  const at::Tensor ids = at::zeros({2, 3}, at::kLong);
  const auto with = [&](const Fields& fields, const std::vector<std::string>& parts) {
    expect_error([&] { MicroBatch(layer, fields).forward({}); }, parts);
  };
  with({}, {"input_ids"});
  with({{"input_ids", ids + 5}}, {"input_ids has 5 at position 0", "vocabulary of 5"});
  with({{"input_ids", at::zeros({2, 5}, at::kLong)}}, {"sequence of 5", "4 positions"});
  with({{"input_ids", ids}, {"token_type_ids", ids + 2}}, {"token_type_ids has 2", "types of 2"});
  with({{"input_ids", ids}, {"token_type_ids", at::zeros({2, 2}, at::kLong)}}, {"token_type_ids [2, 2]", "[2, 3]"});
}

// If no label counts, there is no loss, no gradient and no error. This also holds in evaluation.
TEST(CountedPositions, NothingCounted) {
  test::Typed<BertOptions> o;
  o.vocab = 7;
  o.dim = 4;
  const auto layer = bert(o, o.settings()).layers.back().make();
  const auto parameters = make_parameters(*layer);
  MicroBatch micro_batch(*layer, {{"labels", at::full({2, 3}, kIgnoreLabel, at::kLong)}});
  EXPECT_EQ(micro_batch.forward(random({2, 3, 4}, 1, at::kFloat)).item<double>(), 0);
  const at::Tensor dx = micro_batch.p1({});
  EXPECT_EQ(dx.sizes(), (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(largest(dx), 0);
  micro_batch.p2();
  for (const Parameter* parameter : parameters) EXPECT_EQ(largest(parameter->grad), 0) << parameter->name();
  Context context = micro_batch.context(/*training=*/false);
  Saved saved;
  EXPECT_EQ(layer->forward({random({2, 3, 4}, 1, at::kFloat)}, context, saved)[0].item<double>(), 0);
}

TEST(CountedPositions, LabelsOfAnotherShape) {
  test::Typed<BertOptions> o;
  o.vocab = 7;
  o.dim = 4;
  const auto layer = bert(o, o.settings()).layers.back().make();
  make_parameters(*layer);
  MicroBatch micro_batch(*layer, {{"labels", at::zeros({2, 4}, at::kLong)}});
  expect_error([&] { micro_batch.forward(random({2, 3, 4}, 1, at::kFloat)); }, {"labels [2, 4]", "[2, 3, 4]"});
}

test::Typed<BertOptions> options() {
  test::Typed<BertOptions> o;
  o.tied = true;
  o.vocab = 11;
  o.dim = 12;
  o.layers = 2;
  o.heads = 3;
  o.hidden = 20;
  o.positions = 8;
  return o;
}

constexpr int64_t kBatch = 2;
constexpr int64_t kPositions = 5;
constexpr int64_t kRows = kBatch * kPositions;

// Compares the bytes that are kept after F and after I with these counts of 4-byte numbers. They include the tensors
// that the caller passes in.
void expect_numbers(Layer& layer, std::vector<int64_t> input, std::vector<int64_t> output, const Fields& fields,
                    int64_t after_forward, int64_t after_p1) {
  make_parameters(layer);
  MicroBatch micro_batch(layer, fields);
  LiveBytes bytes;
  micro_batch.forward(input.empty() ? at::Tensor() : random(input, 1, at::kFloat));
  EXPECT_EQ(bytes.now(), 4 * after_forward) << "after F";
  micro_batch.p1(output.empty() ? at::Tensor() : random(output, 2, at::kFloat));
  EXPECT_EQ(bytes.now(), 4 * after_p1) << "after I";
  micro_batch.p2();
  EXPECT_EQ(bytes.now(), 0) << "after W";
}

const std::vector<int64_t> kInput = {kBatch, kPositions, 12};

// The counts are the same with dropout and without it, because masks are not saved.
class BertMemory : public testing::TestWithParam<double> {};
INSTANTIATE_TEST_SUITE_P(Dropout, BertMemory, testing::Values(0.0, 0.25));

// After F: x, q k v, the attention's output (one tensor for I and W) and its log-sums, the sum before the norm, and the
// norm's mean and deviation. After I, for W: x, dL/d(q k v), the attention's output, and dL/dy of the last projection.
TEST_P(BertMemory, AttentionHalf) {
  test::Typed<BertOptions> o = options();
  o.dropout = o.attention_dropout = GetParam();
  const auto layer = bert(o, o.settings()).layers[1].make();
  expect_numbers(*layer, kInput, kInput, {}, kRows * (o.dim + 3 * o.dim + o.dim + o.heads + o.dim + 2),
                 kRows * (o.dim + 3 * o.dim + o.dim + o.dim));
}

// After F: x, GELU's input, the sum before the norm and its statistics. I recomputes GELU's output. After I: x, GELU's
// output and its input's gradient, dL/dy.
TEST_P(BertMemory, MlpHalf) {
  test::Typed<BertOptions> o = options();
  o.dropout = GetParam();
  const auto layer = bert(o, o.settings()).layers[2].make();
  expect_numbers(*layer, kInput, kInput, {}, kRows * (o.dim + o.hidden + o.dim + 2),
                 kRows * (o.dim + 2 * o.hidden + o.dim));
}

// After F: the sum and its statistics, and the ids (of 8 bytes). After I: the sum's gradient and the ids.
TEST_P(BertMemory, Embedding) {
  test::Typed<BertOptions> o = options();
  o.dropout = GetParam();
  const auto layer = bert(o, o.settings()).layers[0].make();
  const Fields fields = {{"input_ids", random_ids({kBatch, kPositions}, o.vocab, 1)}};
  expect_numbers(*layer, {}, kInput, fields, kRows * (o.dim + 2), kRows * o.dim);
}

// Only for the n counted positions, with their indices (8 bytes): x, GELU's input, the norm's input and its statistics,
// its output, the logits. After I: x, the gradient of GELU's input, the norm's output, the logits' gradient.
TEST(BertMemory, Head) {
  const test::Typed<BertOptions> o = options();
  const auto layer = bert(o, o.settings()).layers.back().make();
  at::Tensor labels = at::full({kBatch, kPositions}, kIgnoreLabel, at::kLong);
  labels[0][2] = 3;
  labels[1][0] = 1;
  labels[1][4] = 10;
  expect_numbers(*layer, kInput, {}, {{"labels", labels}}, 3 * (2 + o.dim + o.dim + o.dim + 2 + o.dim + o.vocab),
                 3 * (o.dim + o.dim + o.dim + o.vocab));
}

std::vector<std::string> names_of(const test::Typed<BertOptions>& o) {
  std::vector<std::string> names;
  for (const LayerSpec& spec : bert(o, o.settings()).layers) {
    const auto layer = spec.make();
    std::vector<Parameter*> parameters;
    layer->collect_parameters(parameters);
    for (const Parameter* parameter : parameters) {
      for (const auto& part : parameter->parts()) names.push_back(part.name);
    }
  }
  return names;
}

// The embeddings have 5, each block 16 and the head 6. The decoder's weight in the head is the word embeddings.
TEST(Bert, ParametersAndKinds) {
  const test::Typed<BertOptions> o = options();
  const auto names = names_of(o);
  EXPECT_EQ(names.size(), size_t{5 + 2 * 16 + 6});
  EXPECT_EQ(std::count(names.begin(), names.end(), "bert.embeddings.word_embeddings.weight"), 2);
  test::Typed<BertOptions> untied = o;
  untied.tied = false;
  const auto others = names_of(untied);
  EXPECT_EQ(std::count(others.begin(), others.end(), "cls.predictions.decoder.weight"), 1);
  EXPECT_EQ(std::set<std::string>(others.begin(), others.end()).size(), others.size());
  std::vector<std::string> kinds;
  for (const LayerSpec& spec : bert(o, o.settings()).layers) kinds.push_back(spec.kind);
  EXPECT_EQ(kinds, (std::vector<std::string>{"embedding", "attention", "mlp", "attention", "mlp", "head"}));
}

TEST(Bert, ImpossibleModels) {
  const auto with = [](auto change, const std::string& part) {
    test::Typed<BertOptions> o = options();
    change(o);
    expect_error([&] { bert(o, o.settings()); }, {part});
  };
  with([](test::Typed<BertOptions>& o) { o.heads = 5; }, "dim 12 is not divisible by its 5 heads");
  with([](test::Typed<BertOptions>& o) { o.layers = 0; }, "at least 1");
  with([](test::Typed<BertOptions>& o) { o.dropout = 1; }, "[0, 1)");
  with([](test::Typed<BertOptions>& o) { o.attention_dropout = -1; }, "[0, 1)");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
