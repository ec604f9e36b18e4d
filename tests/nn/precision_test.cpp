// Tests reduced precision: every layer in bfloat16 and float16 against float64, all conversions, and gradients that are
// summed in float32.
#include <cmath>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/nn/layer_cases.h"
#include "twobp/nn/kernels/number.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::EveryLayer;
using test::LayerCase;

double unit_roundoff(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-11;  // significands of 8 and 11 bits
}

// Sums are in float32, so only the roundings in between cause errors: those of the inputs of each layer in the chain.
// There are at most 16 here, for any sizes.
constexpr double kStored = 16;

void compare(const LayerCase& c, at::ScalarType dtype) {
  const double bound = std::min(c.roundings, kStored) * unit_roundoff(dtype);
  const auto layer = c.make(dtype);
  const auto exact = c.make(at::kDouble);
  const auto parameters = test::make_parameters(*layer);
  const auto exact_parameters = test::make_parameters(*exact);
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(parameters[i]->grad.scalar_type(), at::kFloat) << parameters[i]->name();
    EXPECT_EQ(parameters[i]->master.scalar_type(), at::kFloat) << parameters[i]->name();
    exact_parameters[i]->value.copy_(parameters[i]->value);
  }
  const at::Tensor x = c.make_input(3, 1, dtype);
  auto micro_batch = c.micro_batch(*layer, 3, 1, dtype);
  auto exact_micro_batch = c.micro_batch(*exact, 3, 1, at::kDouble);
  const auto to_double = [](const at::Tensor& t) { return t.defined() ? t.to(at::kDouble) : t; };
  const at::Tensor y = micro_batch->forward(x.defined() ? x.clone() : x);
  const at::Tensor exact_y = exact_micro_batch->forward(to_double(x));
  const auto check = [&](const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
    test::expect_within(actual, expected, bound * test::largest(expected), what);
    // Roundings are independent: the deviation of a sum of r errors of at most u is at most sqrt(r) u.
    const double rms = (actual.to(at::kDouble) - expected).square().mean().sqrt().item<double>();
    EXPECT_LE(rms, std::sqrt(std::min(c.roundings, kStored)) * unit_roundoff(dtype) * test::largest(expected)) << what;
  };
  check(y, exact_y, "y");
  if (c.batch_statistics) return;
  at::Tensor dy = c.is_loss() ? at::Tensor() : c.make_gradient(y, 1);
  const at::Tensor exact_dy = to_double(dy);
  const at::Tensor dx = micro_batch->p1(dy);
  const at::Tensor exact_dx = exact_micro_batch->p1(exact_dy);
  if (exact_dx.defined()) check(dx, exact_dx, "dx");
  micro_batch->p2();
  exact_micro_batch->p2();
  for (size_t i = 0; i < parameters.size(); ++i) {
    check(parameters[i]->grad, exact_parameters[i]->grad, parameters[i]->name());
  }
}

TEST_P(EveryLayer, AgreesInBfloat16) {
  if (GetParam().name.find("SquaredError") != std::string::npos) GTEST_SKIP() << "its target stays float32";
  if (GetParam().name == "ExpertsLarge") GTEST_SKIP() << "a rounded score may choose another expert";
  compare(GetParam(), at::kBFloat16);
}

TEST_P(EveryLayer, AgreesInFloat16) {
  if (GetParam().name.find("SquaredError") != std::string::npos) GTEST_SKIP() << "its target stays float32";
  if (GetParam().name == "ExpertsLarge") GTEST_SKIP() << "a rounded score may choose another expert";
  compare(GetParam(), at::kHalf);
}

// Compares every bit pattern with LibTorch's conversions.
TEST(Numbers, LoadAgreesForEveryPattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<uint16_t>(bits);
    const float bf = static_cast<float>(c10::BFloat16(b, c10::BFloat16::from_bits()));
    const float fp = static_cast<float>(c10::Half(b, c10::Half::from_bits()));
    EXPECT_TRUE(load(BFloat16{b}) == bf || std::isnan(bf)) << bits;
    EXPECT_EQ(std::isnan(load(BFloat16{b})), std::isnan(bf)) << bits;
    EXPECT_TRUE(load(Half{b}) == fp || std::isnan(fp)) << bits;
    EXPECT_EQ(std::isnan(load(Half{b})), std::isnan(fp)) << bits;
  }
}

TEST(Numbers, StoreRoundsToNearestEven) {
  std::vector<float> values = {0.f,        -0.f,        1.f,     1.00390625f,    1.01171875f,   3.3895e38f,
                               3.4028e38f, -3.4028e38f, 65504.f, 65520.f,        1e-7f,         1e-40f,
                               INFINITY,   -INFINITY,   NAN,     1.00048828125f, 1.00146484375f};
  uint64_t state = 1;
  for (int i = 0; i < 100000; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(state >> 32)));
  }
  for (const float value : values) {
    BFloat16 b{};
    store(b, value);
    Half h{};
    store(h, value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(load(b)) && std::isnan(load(h)));
      continue;
    }
    EXPECT_EQ(b.bits, c10::BFloat16(value).x) << value;
    EXPECT_EQ(h.bits, c10::Half(value).x) << value;
  }
}

TEST(Precision, ProductsAreSummedInFloat32) {
  Parameter weight({{"w", 1}}, {1, 1}, at::kBFloat16, 1);
  weight.allocate_value(1);
  weight.allocate_grad();
  const at::Tensor one = at::ones({1, 1}, at::kBFloat16);
  // Adds 2^-10 to 1 a thousand times. A sum in bfloat16 would stay at 1.
  weight.accumulate_product(one, one);
  for (int i = 0; i < 1024; ++i) weight.accumulate_product(one, one * 0x1p-10);
  EXPECT_EQ(weight.grad.item<float>(), 2.f);
}

TEST(Precision, ValueIsMasterRounded) {
  Parameter weight({{"w", 64}}, {64, 8}, at::kBFloat16, 1);
  weight.allocate_value(5);
  Parameter exact({{"w", 64}}, {64, 8}, at::kFloat, 1);
  exact.allocate_value(5);
  EXPECT_TRUE(at::equal(weight.master, exact.value)) << "all precisions start from the same weights";
  EXPECT_TRUE(at::equal(weight.value, exact.value.to(at::kBFloat16)));
  weight.master.add_(1);
  weight.refresh_value();
  EXPECT_TRUE(at::equal(weight.value, weight.master.to(at::kBFloat16)));
  EXPECT_TRUE(exact.value.is_same(exact.master));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
