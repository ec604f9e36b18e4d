// Tests our own operators: calls that are refused, and results compared with LibTorch's.
// tests/python/test_packed.py compares their gradients with autograd's.
#include "twobp/graph/own_operators.h"

#include <gtest/gtest.h>

#include "tests/expect_error.h"

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
  std::function<Stack()> arguments;
  std::vector<std::string> message;
};

class BadCall : public ::testing::TestWithParam<Bad> {};

TEST_P(BadCall, IsRefused) {
  test::expect_error(
      [&] {
        Stack stack = GetParam().arguments();
        graph::find_operator(GetParam().op).call(stack);
      },
      GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    All, BadCall,
    ::testing::Values(Bad{"Probability",
                          "twobp::dropout",
                          [] {
                            return Stack{numbers({2}), 1.5, 7};
                          },
                          {"must be in [0, 1]"}},
                      Bad{"GainOfOtherSize",
                          "twobp::rms_norm",
                          [] {
                            return Stack{numbers({2, 3}), numbers({4}), 1e-6};
                          },
                          {"takes (..., n) and a gain (n)"}},
                      Bad{"Activation",
                          "twobp::glu",
                          [] {
                            return Stack{numbers({2, 4}), "relu"};
                          },
                          {"\"relu\"", "silu, gelu or gelu_tanh"}},
                      Bad{"OddGate",
                          "twobp::glu",
                          [] {
                            return Stack{numbers({2, 3}), "gelu"};
                          },
                          {"(..., 2 n)"}},
                      Bad{"GradientOfAnotherGate",
                          "twobp::glu_backward",
                          [] {
                            return Stack{numbers({2, 3}), numbers({2, 4}), "silu"};
                          },
                          {"a gradient (..., n)"}},
                      Bad{"RowsThatAreNoHeads",
                          "twobp::attention",
                          [] {
                            return Stack{numbers({1, 3, 10}), kNone, kNone, 2, 1, true};
                          },
                          {"(heads + 2 kv_heads) n"}},
                      Bad{"HeadsThatCannotShare",
                          "twobp::attention",
                          [] {
                            return Stack{numbers({1, 3, 14}), kNone, kNone, 3, 2, true};
                          },
                          {"3 heads and 2"}},
                      Bad{"CosWithoutSin",
                          "twobp::attention",
                          [] {
                            return Stack{numbers({1, 3, 8}), numbers({3, 1}), kNone, 2, 1, true};
                          },
                          {"both cos and sin, or neither"}},
                      Bad{"TableOfOtherPositions",
                          "twobp::attention",
                          [] {
                            return Stack{numbers({1, 3, 8}), numbers({2, 1}), numbers({3, 1}), 2, 1, true};
                          },
                          {"rotary embedding of 3 positions"}},
                      Bad{"OthersLogSumExp",
                          "twobp::attention_backward",
                          [] {
                            return Stack{numbers({1, 3, 4}),
                                         numbers({1, 3, 8}),
                                         numbers({1, 3, 4}),
                                         numbers({1, 2, 2}),
                                         kNone,
                                         kNone,
                                         2,
                                         1,
                                         true};
                          },
                          {"takes what twobp::attention gave"}},
                      Bad{"OddRotation",
                          "twobp::rotary",
                          [] {
                            return Stack{numbers({1, 2, 3, 5}), numbers({3, 2}), numbers({3, 2}), false};
                          },
                          {"2 n"}},
                      Bad{"LabelBeyondClasses",
                          "twobp::cross_entropy",
                          [] {
                            return Stack{numbers({2, 3}), whole_numbers({0, 3}), -100};
                          },
                          {"label 3 at position 1"}},
                      Bad{"LabelBelowZero",
                          "twobp::cross_entropy",
                          [] {
                            return Stack{numbers({2, 3}), whole_numbers({0, -1}), -100};
                          },
                          {"label -1 at position 1"}},
                      Bad{"OneLabelTooFew",
                          "twobp::cross_entropy",
                          [] {
                            return Stack{numbers({2, 3}), whole_numbers({0}), -100};
                          },
                          {"labels (n)"}},
                      Bad{"GroupBeyondRows",
                          "twobp::grouped_mm",
                          [] {
                            return Stack{numbers({4, 2}), numbers({2, 2, 3}), whole_numbers({1, 5})};
                          },
                          {"group 1", "ends at row 5 of 4"}},
                      Bad{"GroupThatEndsBeforeItBegins",
                          "twobp::grouped_mm_weight",
                          [] {
                            return Stack{numbers({4, 2}), numbers({4, 3}), whole_numbers({3, 1})};
                          },
                          {"group 1", "after row 3"}}),
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

TEST(OwnOperators, RowsWithoutAGroupAreZero) {
  Stack stack{numbers({4, 2}), numbers({2, 2, 3}), whole_numbers({1, 3})};
  graph::find_operator("twobp::grouped_mm").call(stack);
  EXPECT_EQ(stack[0].toTensor()[3].abs().sum().item<double>(), 0);
  EXPECT_TRUE(at::allclose(stack[0].toTensor()[0], at::mv(numbers({2, 2, 3})[0].t(), numbers({4, 2})[0])));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
