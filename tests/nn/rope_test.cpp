// Compares the frequencies of rotary embedding with those of transformers 5.23 (float32) and with their definition.
#include "twobp/nn/layers/rope.h"

#include <cmath>

#include <gtest/gtest.h>

#include "twobp/core/check.h"
#include "twobp/nn/layers/attention.h"

namespace twobp::TWOBP_FILE {
namespace {

std::vector<double> values(const at::Tensor& tensor) {
  const double* data = tensor.const_data_ptr<double>();
  return {data, data + tensor.numel()};
}

void expect_close(const at::Tensor& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.scalar_type(), at::kDouble);
  ASSERT_EQ(actual.sizes(), (std::vector<int64_t>{static_cast<int64_t>(expected.size())}));
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values(actual)[i], expected[i], 3e-7 * expected[i]) << i;
}

TEST(Rope, WithoutScaling) {
  RopeSettings rope;
  rope.theta = 500;
  rope.factor = 7;  // it has no meaning here
  expect_close(rope_frequencies(rope, 6), {1, std::pow(500, -1.0 / 3), std::pow(500, -2.0 / 3)});
  expect_close(rope_frequencies(rope, 2), {1});
}

TEST(Rope, Linear) {
  RopeSettings rope;
  rope.scaling = RopeScaling::kLinear;
  rope.factor = 4;
  expect_close(rope_frequencies(rope, 16),
               {0.25, 0.07905694097280502, 0.02500000037252903, 0.007905694656074047, 0.0024999999441206455,
                0.0007905694656074047, 0.0002500000118743628, 7.905694656074047e-05});
}

// LLaMa 3.1's settings. The first four wavelengths are short, then one is in between, and the last ones are long.
TEST(Rope, Llama3) {
  const RopeSettings rope{500000, RopeScaling::kLlama3, 8, 1, 4, 8192};
  expect_close(rope_frequencies(rope, 16),
               {1, 0.193922758102417, 0.03760603070259094, 0.00729266507551074, 0.0005248460220173001,
                3.428102354519069e-05, 6.647869668086059e-06, 1.289173155782919e-06});
}

// The values of _compute_longrope_parameters.
TEST(Rope, Longrope) {
  RopeSettings rope;
  rope.scaling = RopeScaling::kLongrope;
  rope.original_positions = 16;
  rope.short_factors = {1, 1.5};
  rope.long_factors = {2, 8};
  expect_close(rope_frequencies(rope, 4, 16), {1, 0.006666667});
  expect_close(rope_frequencies(rope, 4, 17), {0.5, 0.00125});
  EXPECT_EQ(rope_magnitude(rope), 1);
  rope.factor = 8;
  EXPECT_NEAR(rope_magnitude(rope), 1.3228756555322954, 1e-15);  // sqrt(1 + 3 / 4)
  rope.attention_factor = 1.25;
  EXPECT_EQ(rope_magnitude(rope), 1.25);
  EXPECT_THROW(rope_frequencies(rope, 6), Error);
}

TEST(Rope, Names) {
  EXPECT_EQ(parse_rope_scaling("none"), RopeScaling::kNone);
  EXPECT_EQ(parse_rope_scaling("linear"), RopeScaling::kLinear);
  EXPECT_EQ(parse_rope_scaling("llama3"), RopeScaling::kLlama3);
  EXPECT_EQ(parse_rope_scaling("yarn"), RopeScaling::kYarn);
  EXPECT_EQ(parse_rope_scaling("dynamic"), RopeScaling::kDynamic);
  EXPECT_EQ(parse_rope_scaling("longrope"), RopeScaling::kLongrope);
  EXPECT_THROW(parse_rope_scaling("su"), Error);
}

TEST(Rope, RefusesWhatMakesNoSense) {
  EXPECT_THROW(rope_frequencies({}, 5), Error);
  EXPECT_THROW(rope_frequencies({}, 0), Error);
  RopeSettings rope;
  rope.theta = 0;
  EXPECT_THROW(rope_frequencies(rope, 4), Error);
  rope = {10000, RopeScaling::kLinear, 0};
  EXPECT_THROW(rope_frequencies(rope, 4), Error);
  rope = {10000, RopeScaling::kLlama3, 8, 4, 4, 8192};
  EXPECT_THROW(rope_frequencies(rope, 4), Error);
  rope = {10000, RopeScaling::kLlama3, 8, 1, 4, 0};
  EXPECT_THROW(rope_frequencies(rope, 4), Error);
}

TEST(Rope, AttentionUsesTheSettings) {
  AttentionShape shape{2, 1, 4, {}};
  const at::Tensor packed = at::rand({1, 6, shape.packed()}, at::kFloat);
  const auto run = [&] {
    Context context;
    context.training = false;
    Saved saved;
    return Attention(shape, at::kFloat).forward({packed.clone()}, context, saved)[0];
  };
  const at::Tensor plain = run();
  shape.rope.scaling = RopeScaling::kLinear;
  EXPECT_TRUE(at::equal(run(), plain));  // with a factor of 1
  shape.rope.factor = 3;
  EXPECT_FALSE(at::allclose(run(), plain, 1e-4, 1e-4));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
