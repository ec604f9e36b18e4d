// Properties of Mamba's layers only: bytes, initial values, bad input.
#include <cmath>

#include "tests/nn/mamba_layers.h"
#include "tests/nn/mamba_reference.h"
#include "twobp/nn/layers/mamba_mixer.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

// Several groups of channels and several chunks. They do not divide the numbers of channels and positions.
const MambaMixerShape kShape{12, 300, 5, 4, 3};

// After F: the input (for W), (u | z), u after the convolution, (dt | B | C), a copy of dt, dt_proj's output, the
// scan's output (for W), and the states at the borders between chunks. After I: inputs and output gradients of four
// projections. The gradients of (u | z) and of dt_proj's output overwrite the values.
TEST(MambaFacts, BytesKept) {
  const int64_t batch = 2;
  const int64_t positions = 67;  // 2 borders
  const int64_t rows = batch * positions;
  const auto whole = whole_mixer("mixer", kShape, 1, at::kFloat);
  Layer& mixer = *whole;
  make_parameters(mixer);
  MicroBatch micro_batch(mixer);
  const auto& [dim, inner, state, kernel, rank] = kShape;
  LiveBytes bytes;
  micro_batch.forward(random({batch, positions, dim}, 1, at::kFloat));
  const int64_t dt_b_c = rank + 2 * state;
  EXPECT_EQ(bytes.now(),
            4 * (rows * (dim + 2 * inner + inner + dt_b_c + rank + inner + inner) + batch * 2 * state * inner));
  micro_batch.p1(random({batch, positions, dim}, 2, at::kFloat));
  EXPECT_EQ(bytes.now(), 4 * rows * ((dim + 2 * inner) + (inner + dt_b_c) + (rank + inner) + (inner + dim)));
  micro_batch.p2();
  EXPECT_EQ(bytes.now(), 0);
}

TEST(MambaFacts, WComesOutProjectionByProjection) {
  const auto whole = whole_mixer("mixer", kShape, 1, at::kFloat);
  Layer& mixer = *whole;
  make_parameters(mixer);
  MicroBatch micro_batch(mixer);
  micro_batch.forward(random({1, 3, kShape.dim}, 1, at::kFloat));
  micro_batch.p1(random({1, 3, kShape.dim}, 2, at::kFloat));
  EXPECT_EQ(micro_batch.p2_units().size(), 4u);
}

// If (u | z) is also held elsewhere, as by recomputation, it must not change. Otherwise its gradient overwrites it. The
// numbers are the same.
TEST(MambaFacts, OverwritesOnlyItsOwnTensors) {
  MambaMixer mixer("mixer", kShape, 1, at::kFloat);
  make_parameters(mixer);
  const at::Tensor uz = random({2, 5, 2 * kShape.inner}, 1, at::kFloat);
  const at::Tensor before = uz.clone();
  const at::Tensor dy = random({2, 5, kShape.dim}, 2, at::kFloat);
  const auto gradient = [&](at::Tensor input) {
    const void* where = input.const_data_ptr();
    MicroBatch micro_batch(mixer);
    micro_batch.forward(std::move(input));
    at::Tensor duz = micro_batch.p1(dy.clone());
    return std::pair(duz.const_data_ptr() == where, std::move(duz));
  };
  const auto [of_shared_in_place, of_shared] = gradient(uz);
  EXPECT_FALSE(of_shared_in_place);
  EXPECT_TRUE(same_bits(uz, before));
  const auto [of_own_in_place, of_own] = gradient(uz.clone());
  EXPECT_TRUE(of_own_in_place);
  EXPECT_TRUE(same_bits(of_own, of_shared));
}

TEST(MambaFacts, InitialValues) {
  const auto whole = whole_mixer("m", {16, 400, 6, 4, 25}, 0.02, at::kFloat);
  Layer& mixer = *whole;
  std::vector<Parameter*> parameters;
  mixer.collect_parameters(parameters);
  std::map<std::string, Parameter*> named;
  for (Parameter* parameter : parameters) {
    parameter->allocate_value(3);
    named[parameter->name()] = parameter;
  }
  const auto value = [&](const std::string& name) { return named.at("m." + name)->value; };
  for (int64_t n = 0; n < 6; ++n) {
    const at::Tensor column = value("A_log").select(1, n);
    EXPECT_TRUE(same_bits(column, at::full({400}, static_cast<float>(std::log(n + 1.0))))) << n;
  }
  EXPECT_TRUE(same_bits(value("D"), at::ones({400})));
  const at::Tensor steps = at::softplus(value("dt_proj.bias").to(at::kDouble));
  EXPECT_GE(steps.min().item<double>(), 0.001 * (1 - 1e-4));
  EXPECT_LE(steps.max().item<double>(), 0.1 * (1 + 1e-4));
  EXPECT_NEAR(steps.log().mean().item<double>(), std::log(0.01), 0.2) << "log-uniform";
  for (const auto& [name, bound] :
       std::map<std::string, double>{{"conv1d.weight", 0.5}, {"dt_proj.weight", 0.2}, {"out_proj.weight", 0.05}}) {
    EXPECT_LE(largest(value(name)), bound) << name;
    EXPECT_GT(largest(value(name)), 0.97 * bound) << name;
    EXPECT_LT(value(name).mean().abs().item<double>(), 0.1 * bound) << name;
  }
  EXPECT_EQ(largest(value("conv1d.bias")), 0);
  EXPECT_NEAR(value("in_proj.weight").std().item<double>(), 0.02, 1e-3);
  EXPECT_FALSE(named.at("m.A_log")->decays());
  EXPECT_FALSE(named.at("m.D")->decays());
  EXPECT_TRUE(named.at("m.conv1d.weight")->decays());
  // Other layers have other values. The same layer has the same values.
  const auto again = whole_mixer("m", {16, 400, 6, 4, 25}, 0.02, at::kFloat);
  const auto other = whole_mixer("n", {16, 400, 6, 4, 25}, 0.02, at::kFloat);
  const auto bias_of = [](Layer& of) {
    std::vector<Parameter*> all;
    of.collect_parameters(all);
    all[7]->allocate_value(3);
    return all[7]->value;
  };
  EXPECT_TRUE(same_bits(bias_of(*again), value("dt_proj.bias")));
  EXPECT_FALSE(same_bits(bias_of(*other), value("dt_proj.bias")));
}

// At the first position, no state decays, so A has no gradient. The other parameters have one.
TEST(MambaFacts, OnePosition) {
  const auto whole = whole_mixer("mixer", kShape, 0.5, at::kDouble);
  Layer& mixer = *whole;
  make_telling(mixer);
  const auto parameters = make_parameters(mixer);
  const at::Tensor x = random({2, 1, kShape.dim}, 1);
  const at::Tensor dy = random({2, 1, kShape.dim}, 2);
  MicroBatch micro_batch(mixer);
  const at::Tensor y = micro_batch.forward(x.clone());
  const at::Tensor dx = micro_batch.p1(dy.clone());
  micro_batch.p2();
  const at::Tensor leaf = x.clone().requires_grad_(true);
  std::vector<at::Tensor> weights;
  for (const Parameter* parameter : parameters) weights.push_back(parameter->value.clone().requires_grad_(true));
  const at::Tensor expected = reference::mamba_mixer(leaf, weights, kShape);
  expected.backward(dy);
  expect_close(y, expected.detach(), 1500, at::kDouble, "y");
  expect_close(dx, leaf.grad(), 1500, at::kDouble, "dx");
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::string& name = parameters[i]->name();
    expect_close(parameters[i]->grad, weights[i].grad(), 1500, at::kDouble, name);
    EXPECT_EQ(largest(parameters[i]->grad) == 0, name.ends_with("A_log")) << name;
  }
}

TEST(MambaFacts, LaterPositionsDoNotReachEarlierOnes) {
  const auto whole = whole_mixer("mixer", kShape, 0.3, at::kFloat);
  Layer& mixer = *whole;
  make_parameters(mixer);
  const at::Tensor x = random({2, 40, kShape.dim}, 1, at::kFloat);
  at::Tensor other = x.clone();
  other.narrow(1, 35, 5).add_(1);
  const at::Tensor y = MicroBatch(mixer).evaluate(x);
  const at::Tensor y_other = MicroBatch(mixer).evaluate(other);
  EXPECT_TRUE(same_bits(y.narrow(1, 0, 35), y_other.narrow(1, 0, 35)));
  EXPECT_FALSE(same_bits(y.narrow(1, 35, 1), y_other.narrow(1, 35, 1)));
}

TEST(MambaFacts, WrongShapesAreErrors) {
  Context context;
  Saved saved;
  SelectiveScan scan("mixer", 6, 2, at::kFloat);
  make_parameters(scan);
  const auto t = [](std::vector<int64_t> sizes) { return random(sizes, 1, at::kFloat); };
  expect_error([&] { scan.forward({t({1, 3, 6})}, context, saved); }, {"mixer.A_log", "got 1 tensors"});
  expect_error(
      [&] {
        scan.forward({t({1, 3, 5}), t({1, 3, 6}), t({1, 3, 4}), t({1, 3, 6})}, context, saved);
      },
      {"(batch, sequence, 6)", "[1, 3, 5]"});
  expect_error(
      [&] {
        scan.forward({t({1, 3, 6}), t({1, 3, 6}), t({1, 3, 5}), t({1, 3, 6})}, context, saved);
      },
      {"B and C", "(1, 3, 4)", "[1, 3, 5]"});
  expect_error(
      [&] {
        scan.forward({t({1, 3, 6}), t({1, 3, 6}), t({1, 3, 4}), t({1, 2, 6})}, context, saved);
      },
      {"one shape", "[1, 2, 6]"});
  expect_error(
      [&] {
        scan.forward({t({1, 3, 6}), t({1, 3, 6}), t({1, 3, 4}).to(at::kDouble), t({1, 3, 6})}, context, saved);
      },
      {"Float", "Double"});
  scan.forward({t({1, 3, 6}), t({1, 3, 6}), t({1, 3, 4}), t({1, 3, 6})}, context, saved);
  expect_error([&] { scan.backward_p1({t({1, 2, 6})}, context, saved); }, {"[1, 2, 6]", "[1, 3, 6]"});
  MambaMixer mixer("mixer", kShape, 1, at::kFloat);
  make_parameters(mixer);
  expect_error([&] { mixer.forward({t({1, 3, 12})}, context, saved); }, {"MambaMixer", "600", "[1, 3, 12]"});
  CausalConv1d conv("conv1d", 6, 4, at::kFloat);
  make_parameters(conv);
  expect_error([&] { conv.forward({t({1, 3, 5})}, context, saved); }, {"conv1d.weight", "[1, 3, 5]"});
  expect_error([] { CausalConv1d("conv1d", 6, 17, at::kFloat); }, {"kernel of 17", "16"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
