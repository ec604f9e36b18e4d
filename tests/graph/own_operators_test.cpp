// Tests our own operators: calls that are refused, and results compared with LibTorch's. tests/python/test_packed.py
// compares their gradients with autograd's.
#include "twobp/graph/own_operators.h"

#include <algorithm>
#include <optional>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp::TWOBP_FILE {
namespace {

using graph::Stack;

at::Tensor numbers(at::IntArrayRef sizes) {
  return at::randn(sizes, at::detail::createCPUGenerator(1), at::TensorOptions().dtype(at::kDouble));
}

at::Tensor whole_numbers(std::vector<int64_t> values) {
  return at::tensor(values, at::kLong);
}

const c10::IValue kNone;

struct Bad {
  const char* name;
  const char* op;
  Stack arguments;
  std::vector<std::string> message;
};

at::Tensor bytes(int64_t count) {
  return at::arange(count, at::kLong).mul(37).to(at::kByte);
}

at::Tensor codes() {
  return at::arange(16, at::kFloat).sub(7).div(8);
}

at::Tensor scales(int64_t count) {
  return at::arange(1, count + 1, at::kFloat);
}

class BadCall : public ::testing::TestWithParam<Bad> {};

TEST_P(BadCall, IsRefused) {
  test::expect_error(
      [&] {
        Stack stack = GetParam().arguments;
        graph::find_operator(GetParam().op).call(stack);
      },
      GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    All, BadCall,
    ::testing::Values(
        Bad{"Probability", "twobp::dropout", {numbers({2}), 1.5, 7}, {"must be in [0, 1]"}},
        Bad{"GainOfOtherSize",
            "twobp::rms_norm",
            {numbers({2, 3}), numbers({4}), 1e-6},
            {"takes (..., n) and a gain (n)"}},
        Bad{"Activation", "twobp::glu", {numbers({2, 4}), "relu"}, {"\"relu\"", "silu, gelu or gelu_tanh"}},
        Bad{"OddGate", "twobp::glu", {numbers({2, 3}), "gelu"}, {"(..., 2 n)"}},
        Bad{"GradientOfAnotherGate",
            "twobp::glu_backward",
            {numbers({2, 3}), numbers({2, 4}), "silu"},
            {"a gradient (..., n)"}},
        Bad{"RowsThatAreNoHeads",
            "twobp::attention",
            {numbers({1, 3, 10}), kNone, kNone, 2, 1, true},
            {"(heads + 2 kv_heads) n"}},
        Bad{"HeadsThatCannotShare",
            "twobp::attention",
            {numbers({1, 3, 14}), kNone, kNone, 3, 2, true},
            {"3 heads and 2"}},
        Bad{"CosWithoutSin",
            "twobp::attention",
            {numbers({1, 3, 8}), numbers({3, 1}), kNone, 2, 1, true},
            {"both cos and sin, or neither"}},
        Bad{"TableOfOtherPositions",
            "twobp::attention",
            {numbers({1, 3, 8}), numbers({2, 1}), numbers({3, 1}), 2, 1, true},
            {"rotary embedding of 3 positions"}},
        Bad{"OthersLogSumExp",
            "twobp::attention_backward",
            {numbers({1, 3, 4}), numbers({1, 3, 8}), numbers({1, 3, 4}), numbers({1, 2, 2}), kNone, kNone, 2, 1, true},
            {"takes what twobp::attention gave"}},
        Bad{"OddRotation", "twobp::rotary", {numbers({1, 2, 3, 5}), numbers({3, 2}), numbers({3, 2}), false}, {"2 n"}},
        Bad{"LabelBeyondClasses",
            "twobp::cross_entropy",
            {numbers({2, 3}), whole_numbers({0, 3}), -100},
            {"label 3 at position 1"}},
        Bad{"LabelBelowZero",
            "twobp::cross_entropy",
            {numbers({2, 3}), whole_numbers({0, -1}), -100},
            {"label -1 at position 1"}},
        Bad{"OneLabelTooFew", "twobp::cross_entropy", {numbers({2, 3}), whole_numbers({0}), -100}, {"labels (n)"}},
        Bad{"GroupBeyondRows",
            "twobp::grouped_mm",
            {numbers({4, 2}), numbers({2, 2, 3}), whole_numbers({1, 5})},
            {"group 1", "ends at row 5 of 4"}},
        Bad{"GroupThatEndsBeforeItBegins",
            "twobp::grouped_mm_weight",
            {numbers({4, 2}), numbers({4, 3}), whole_numbers({3, 1})},
            {"group 1", "after row 3"}},
        Bad{"OneByteTooFew",
            "twobp::linear_4bit",
            {numbers({2, 6}), bytes(8), scales(5), codes(), 3, 4, int64_t(at::kFloat)},
            {"a weight (3, 6) of 4 bits in blocks of 4 has 9 bytes, 5 scales", "not [8] Byte"}},
        Bad{"OneScaleTooMany",
            "twobp::linear_4bit_backward",
            {numbers({2, 3}), bytes(9), scales(6), codes(), 6, 4, int64_t(at::kFloat)},
            {"5 scales", "[6]"}},
        Bad{"OddBlocks",
            "twobp::linear_4bit",
            {numbers({2, 6}), bytes(9), scales(6), codes(), 3, 3, int64_t(at::kFloat)},
            {"blocks of an even size", "in blocks of 3"}},
        Bad{"RowsBeyondMemory",
            "twobp::linear_4bit",
            {numbers({2, 6}), bytes(9), scales(5), codes(), int64_t{1} << 60, 4, int64_t(at::kFloat)},
            {"has rows, columns and blocks"}},
        Bad{"RoundedToWholeNumbers",
            "twobp::linear_4bit_backward",
            {numbers({2, 3}), bytes(9), scales(5), codes(), 6, 4, int64_t(at::kLong)},
            {"rounded to a floating-point dtype, not Long"}}),
    [](const auto& info) { return info.param.name; });

TEST(OwnOperators, DoNotChangeAnArgumentWithOtherUsers) {
  const at::Tensor qkv = numbers({2, 3, 8});
  const at::Tensor logits = numbers({4, 3});
  const at::Tensor before[] = {qkv.clone(), logits.clone()};
  Stack stack{qkv, numbers({3, 1}), numbers({3, 1}), 2, 1, true};
  graph::find_operator("twobp::attention").call(stack);
  stack = {logits, whole_numbers({0, 1, 2, -100}), -100};
  graph::find_operator("twobp::cross_entropy").call(stack);
  EXPECT_TRUE(at::equal(qkv, before[0]));
  EXPECT_TRUE(at::equal(logits, before[1]));
}

TEST(OwnOperators, CrossEntropyTakesTheMemoryOfItsLogits) {
  Stack stack{numbers({4, 3}), whole_numbers({0, 1, 2, -100}), -100};
  const void* memory = stack[0].toTensor().const_data_ptr();
  graph::find_operator("twobp::cross_entropy").call(stack);
  EXPECT_EQ(stack[1].toTensor().const_data_ptr(), memory);
  const at::Tensor expected =
      at::cross_entropy_loss(numbers({4, 3}), whole_numbers({0, 1, 2, -100}), {}, at::Reduction::Sum);
  EXPECT_NEAR(stack[0].toTensor().item<double>(), expected.item<double>(), 1e-12);
}

// Attention over slices, F first to last and I last to first, and over whole sequences.
class SlicedAttention {
 public:
  explicit SlicedAttention(std::vector<int64_t> cuts) : cuts_(std::move(cuts)), saved_(cuts_.size() - 1) {
    for (size_t s = 1; s < saved_.size(); ++s) saved_[s].follow(&saved_[s - 1]);
  }

  size_t count() const { return saved_.size(); }
  Stack run(const char* name, size_t s, Stack stack, bool keeps = true) {
    const graph::SliceCall slice{cuts_[s], cuts_[s + 1] - cuts_[s], cuts_.back(), keeps, &saved_[s]};
    graph::find_operator(name).of_slice(stack, slice);
    return stack;
  }
  at::Tensor part(const at::Tensor& whole, int64_t dim, size_t s) const {
    return whole.narrow(dim, cuts_[s], cuts_[s + 1] - cuts_[s]).contiguous();
  }
  bool holds_nothing() const {
    return std::all_of(saved_.begin(), saved_.end(),
                       [](const Saved& one) { return one.to_later.empty() && one.from_later.empty(); });
  }

 private:
  std::vector<int64_t> cuts_;
  std::vector<Saved> saved_;
};

TEST(OwnOperators, PackedAttentionOfSlicesGivesTheWhole) {
  constexpr int64_t kHeads = 4, kKvHeads = 2, kPositions = 11;
  const at::Tensor qkv = numbers({2, kPositions, (kHeads + 2 * kKvHeads) * 6});
  const at::Tensor cos = numbers({kPositions, 3}), sin = cos.flip(0).contiguous();
  const at::Tensor dout = numbers({2, kPositions, kHeads * 6}).flip(1).contiguous();
  Stack whole{qkv.clone(), cos, sin, kHeads, kKvHeads, true};
  graph::find_operator("twobp::attention").call(whole);
  Stack gradient{dout, whole[1].toTensor().clone(), whole[0], whole[2], cos, sin, kHeads, kKvHeads, true};
  graph::find_operator("twobp::attention_backward").call(gradient);

  SlicedAttention sliced({0, 4, 5, kPositions});
  std::vector<at::Tensor> out(sliced.count()), dqkv(sliced.count());
  std::vector<Stack> kept;
  for (size_t s = 0; s < sliced.count(); ++s) {
    const at::Tensor own_cos = sliced.part(cos, 0, s), own_sin = sliced.part(sin, 0, s);
    kept.push_back(
        sliced.run("twobp::attention", s, {sliced.part(qkv, 1, s), own_cos, own_sin, kHeads, kKvHeads, true}));
    out[s] = kept[s][0].toTensor();
  }
  for (size_t s = sliced.count(); s-- > 0;) {
    Stack stack{sliced.part(dout, 1, s),
                std::move(kept[s][1]),
                kept[s][0],
                kept[s][2],
                sliced.part(cos, 0, s),
                sliced.part(sin, 0, s),
                kHeads,
                kKvHeads,
                true};
    dqkv[s] = sliced.run("twobp::attention_backward", s, std::move(stack))[0].toTensor();
  }
  EXPECT_LT((at::cat(out, 1) - whole[0].toTensor()).abs().max().item<double>(), 1e-12);
  EXPECT_LT((at::cat(dqkv, 1) - gradient[0].toTensor()).abs().max().item<double>(), 1e-12);
  EXPECT_TRUE(sliced.holds_nothing());
}

TEST(OwnOperators, AttentionApartOfSlicesGivesTheWhole) {
  constexpr int64_t kPositions = 11;
  const at::Tensor q = numbers({2, 4, kPositions, 6}), k = q.narrow(1, 0, 2).flip(2),
                   v = numbers({2, 2, kPositions, 6});
  const at::Tensor dout = q.flip(3).contiguous();
  for (const c10::IValue& scale : {c10::IValue(), c10::IValue(0.3)}) {
    Stack whole{q, k, v, scale};
    graph::find_operator("twobp::causal_attention").call(whole);
    Stack gradients{dout, q, k, v, whole[0], whole[1], scale};
    graph::find_operator("twobp::causal_attention_backward").call(gradients);

    SlicedAttention sliced({0, 4, 5, kPositions});
    std::vector<Stack> kept;
    std::vector<std::vector<at::Tensor>> parts(4, std::vector<at::Tensor>(sliced.count()));
    const auto of = [&](const at::Tensor& tensor, size_t s) { return sliced.part(tensor, 2, s); };
    for (size_t s = 0; s < sliced.count(); ++s) {
      kept.push_back(sliced.run("twobp::causal_attention", s, {of(q, s), of(k, s), of(v, s), scale}));
      parts[3][s] = kept[s][0].toTensor();
    }
    for (size_t s = sliced.count(); s-- > 0;) {
      Stack stack{of(dout, s), of(q, s), of(k, s), of(v, s), kept[s][0], kept[s][1], scale};
      stack = sliced.run("twobp::causal_attention_backward", s, std::move(stack));
      for (size_t i = 0; i < 3; ++i) parts[i][s] = stack[i].toTensor();
    }
    const at::Tensor expected[] = {gradients[0].toTensor(), gradients[1].toTensor(), gradients[2].toTensor(),
                                   whole[0].toTensor()};
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_LT((at::cat(parts[i], 2) - expected[i]).abs().max().item<double>(), 1e-12) << i;
    }
    EXPECT_TRUE(sliced.holds_nothing());
  }
}

TEST(OwnOperators, AttentionOfASliceIsRefused) {
  test::expect_error(
      [] {
        SlicedAttention sliced({0, 2, 5});
        sliced.run("twobp::attention", 0, {numbers({1, 2, 8}), kNone, kNone, 2, 1, false});
      },
      {"both directions", "no slices"});
  test::expect_error(
      [] {
        SlicedAttention sliced({0, 2, 5});
        sliced.run("twobp::attention", 1, {numbers({1, 3, 8}), kNone, kNone, 2, 1, true});
      },
      {"does not find the keys of an earlier slice"});
  test::expect_error(
      [] {
        SlicedAttention sliced({0, 2, 5});
        sliced.run("twobp::attention", 0, {numbers({2, 2, 8}), kNone, kNone, 2, 1, true});
        sliced.run("twobp::attention", 1, {numbers({1, 3, 8}), kNone, kNone, 2, 1, true});
      },
      {"keys [2, 2, 8]", "but needs (batch 1, "});
  test::expect_error(
      [] {
        SlicedAttention sliced({0, 2, 5});
        sliced.run("twobp::attention", 0, {numbers({1, 3, 8}), kNone, kNone, 2, 1, true});
      },
      {"got 3 positions after 0", "has 2 after 0"});
}

// The mask of a slice is its part of the whole sequences'.
TEST(OwnOperators, DropoutOfSlicesHasTheMaskOfTheWhole) {
  Stack whole{at::ones({2, 11, 40}), 0.4, 7};
  graph::find_operator("twobp::dropout").call(whole);
  SlicedAttention sliced({0, 4, 5, 11});
  for (size_t s = 0; s < sliced.count(); ++s) {
    const Stack part = sliced.run("twobp::dropout", s, {sliced.part(at::ones({2, 11, 40}), 1, s), 0.4, 7});
    EXPECT_TRUE(at::equal(part[1].toTensor(), sliced.part(whole[1].toTensor(), 1, s))) << s;
  }
}

// (5, 3): an odd number of numbers, and a last block that is not full.
TEST(OwnOperators, WeightsOfFourBits) {
  at::Tensor weight = at::empty({15}, at::kFloat);
  for (int64_t i = 0; i < 15; ++i) {
    const int64_t byte = (i / 2 * 37) % 256;
    weight[i] = codes()[i % 2 == 0 ? byte / 16 : byte % 16] * static_cast<double>(i / 4 + 1);
  }
  weight = weight.view({5, 3});
  for (const bool by_operators : {false, true}) {
    std::optional<OperatorsEverywhere> everywhere;
    if (by_operators) everywhere.emplace();
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor x = numbers({2, 4, 3}).to(dtype), dy = numbers({2, 4, 5}).to(dtype);
      Stack stack{x, bytes(8), scales(4), codes(), 5, 4, int64_t(at::kFloat)};
      graph::find_operator("twobp::linear_4bit").call(stack);
      EXPECT_TRUE(at::allclose(stack[0].toTensor(), at::matmul(x, weight.to(dtype).t()), 1e-5, 1e-6));
      stack = {dy, bytes(8), scales(4), codes(), 3, 4, int64_t(at::kBFloat16)};
      graph::find_operator("twobp::linear_4bit_backward").call(stack);
      EXPECT_TRUE(at::allclose(stack[0].toTensor(), at::matmul(dy, weight.to(at::kBFloat16).to(dtype)), 1e-5, 1e-6));
    }
  }
}

TEST(OwnOperators, RowsWithoutAGroupAreZero) {
  Stack stack{numbers({4, 2}), numbers({2, 2, 3}), whole_numbers({1, 3})};
  graph::find_operator("twobp::grouped_mm").call(stack);
  EXPECT_EQ(stack[0].toTensor()[3].abs().sum().item<double>(), 0);
  EXPECT_TRUE(at::allclose(stack[0].toTensor()[0], at::mv(numbers({2, 2, 3})[0].t(), numbers({4, 2})[0])));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
