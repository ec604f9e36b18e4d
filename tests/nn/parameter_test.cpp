// Tests parameters: values that depend only on seed and name, packed parts, and gradients that begin with the first
// contribution of a step.
#include <cmath>

#include "tests/nn/layer_test_util.h"
#include "twobp/models/decoder/family.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

Parameter made(std::vector<ParameterPart> parts, int64_t cols, uint64_t seed, at::ScalarType dtype = at::kFloat) {
  int64_t rows = 0;
  for (const auto& part : parts) rows += part.rows;
  Parameter parameter(std::move(parts), {rows, cols}, dtype, 0.5);
  parameter.allocate_value(seed);
  return parameter;
}

TEST(Parameter, ValueDependsOnSeedAndNameAlone) {
  const at::Tensor value = made({{"a", 5}}, 7, 1).value;
  const Parameter between = made({{"b", 50}}, 3, 9);  // other parameters made before have no effect
  EXPECT_TRUE(same_bits(made({{"a", 5}}, 7, 1).value, value));
  EXPECT_FALSE(same_bits(made({{"b", 5}}, 7, 1).value, value));
  EXPECT_FALSE(same_bits(made({{"a", 5}}, 7, 2).value, value));
}

TEST(Parameter, EveryBitOfTheSeedCounts) {
  const at::Tensor value = made({{"a", 5}}, 7, 1).value;
  for (int bit = 1; bit < 64; ++bit) {
    EXPECT_FALSE(same_bits(made({{"a", 5}}, 7, 1 + (uint64_t{1} << bit)).value, value)) << "bit " << bit;
  }
}

// Sizes below and above 16 numbers, because LibTorch draws them differently.
TEST(Parameter, PackedPartsEqualSeparateOnes) {
  for (const int64_t cols : {3, 7, 40}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor packed = made({{"q", 4}, {"k", 2}, {"v", 3}}, cols, 5, dtype).value;
      EXPECT_TRUE(same_bits(packed.narrow(0, 0, 4), made({{"q", 4}}, cols, 5, dtype).value));
      EXPECT_TRUE(same_bits(packed.narrow(0, 4, 2), made({{"k", 2}}, cols, 5, dtype).value));
      EXPECT_TRUE(same_bits(packed.narrow(0, 6, 3), made({{"v", 3}}, cols, 5, dtype).value));
    }
  }
}

// Mean and deviation of 40000 numbers, within five standard errors: 0.5 / 200 and 0.5 / 283.
TEST(Parameter, ValuesAreNormalWithTheGivenDeviation) {
  const at::Tensor value = made({{"a", 200}}, 200, 3).value.to(at::kDouble);
  EXPECT_NEAR(value.mean().item<double>(), 0, 5 * 0.5 / 200);
  EXPECT_NEAR(value.std().item<double>(), 0.5, 5 * 0.5 / std::sqrt(2 * 40000.0));
}

TEST(Parameter, GainsAreFilledAndDoNotDecay) {
  Parameter gain({{"g", 4}}, {4}, at::kFloat, 0, 1);
  gain.allocate_value(1);
  EXPECT_TRUE(same_bits(gain.value, at::ones({4})));
  EXPECT_FALSE(gain.decays());
  EXPECT_TRUE(made({{"w", 4}}, 4, 1).decays());
}

TEST(Parameter, PartsMustAddUp) {
  expect_error([] { Parameter({{"q", 4}, {"k", 2}}, {7, 3}, at::kFloat, 1); }, {"q", "6 rows", "7"});
}

TEST(Parameter, FirstContributionOverwritesTheNextOnesAdd) {
  Parameter w({{"w", 2}}, {2, 3}, at::kFloat, 1);
  w.allocate_grad();
  EXPECT_FALSE(w.has_grad());
  w.grad.fill_(std::numeric_limits<float>::quiet_NaN());  // as a newly allocated buffer may contain
  const at::Tensor a = at::full({2, 1}, 2.0, at::kFloat);
  const at::Tensor b = at::full({1, 3}, 3.0, at::kFloat);
  w.accumulate_product(a, b);
  EXPECT_TRUE(w.has_grad());
  EXPECT_TRUE(same_bits(w.grad, at::full({2, 3}, 6.0, at::kFloat)));
  w.accumulate_product(a, b);
  EXPECT_TRUE(same_bits(w.grad, at::full({2, 3}, 12.0, at::kFloat)));
  w.grad_to_add().add_(1);
  EXPECT_TRUE(same_bits(w.grad, at::full({2, 3}, 13.0, at::kFloat)));
  w.forget_grad();
  EXPECT_FALSE(w.has_grad());
  w.grad_to_add().add_(1);
  EXPECT_TRUE(same_bits(w.grad, at::ones({2, 3})));
}

// The weights are the same in any division into stages and any order of creation. All names are different.
TEST(Parameter, ModelWeightsDoNotDependOnTheOrderOfMaking) {
  DecoderOptions o;
  o.vocab = 7;
  o.dim = 6;
  o.layers = 2;
  o.heads = o.kv_heads = 1;
  o.head_dim = 6;
  o.hidden = 5;
  const ModelSpec model = llama(o);
  std::vector<at::Tensor> values;
  std::vector<std::string> names;
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();
    std::vector<Parameter*> parameters;
    layer->collect_parameters(parameters);
    for (Parameter* parameter : parameters) {
      parameter->allocate_value(4);
      values.push_back(parameter->value);
      for (const auto& part : parameter->parts()) names.push_back(part.name);
    }
  }
  size_t i = values.size();
  for (size_t l = model.layers.size(); l-- > 0;) {
    const auto layer = model.layers[l].make();
    std::vector<Parameter*> parameters;
    layer->collect_parameters(parameters);
    for (size_t p = parameters.size(); p-- > 0;) {
      parameters[p]->allocate_value(4);
      EXPECT_TRUE(same_bits(parameters[p]->value, values[--i])) << parameters[p]->name();
    }
  }
  EXPECT_EQ(i, 0u);
  EXPECT_EQ(names.size(), 1 + 2 * 9 + 2u);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
