// Compares the output, input gradient and parameter gradients of every layer with finite differences in
// float64, and with autograd of a reference in float64 and float32.
#include <cmath>
#include <numeric>

#include "tests/nn/layer_cases.h"
#include "twobp/nn/kernels/operators.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

struct Gradients {
  at::Tensor y;
  at::Tensor dx;  // undefined for a layer without input
  std::vector<at::Tensor> dw;
};

constexpr int64_t kSamples = 2;

struct Setting {
  explicit Setting(const LayerCase& c, at::ScalarType dtype)
      : layer_case(c),
        dtype(dtype),
        layer(c.make(dtype)),
        parameters(make_parameters(*layer)),
        x(c.make_input(kSamples, 3, dtype)) {
    MicroBatch& micro_batch = *new_micro_batch();
    dy = c.make_gradient(micro_batch.evaluate(x), 3);
  }

  MicroBatch* new_micro_batch() {
    micro_batches.push_back(layer_case.micro_batch(*layer, kSamples, 3, dtype));
    return micro_batches.back().get();
  }

  const LayerCase& layer_case;
  at::ScalarType dtype;
  std::unique_ptr<Layer> layer;
  std::vector<Parameter*> parameters;
  std::vector<std::unique_ptr<MicroBatch>> micro_batches;
  at::Tensor x;
  at::Tensor dy;
};

at::Tensor copy_of(const at::Tensor& t) {
  return t.defined() ? t.clone() : t;
}

// x and dy are moved in, so the layer may overwrite them.
Gradients run(Setting& s, at::Tensor x, at::Tensor dy) {
  forget_grads(s.parameters);
  MicroBatch& micro_batch = *s.new_micro_batch();
  Gradients out;
  out.y = copy_of(micro_batch.forward(std::move(x)));
  out.dx = micro_batch.p1(std::move(dy));
  micro_batch.p2();
  out.dw = copy_grads(s.parameters);
  return out;
}

Gradients run(Setting& s) {
  return run(s, copy_of(s.x), copy_of(s.dy));
}

at::Tensor leaf(const at::Tensor& t) {
  return t.defined() ? t.to(at::kDouble).clone().requires_grad_(true) : t;
}

Gradients autograd(const Setting& s) {
  const at::Tensor x = leaf(s.x);
  std::vector<at::Tensor> weights;
  for (const Parameter* parameter : s.parameters) weights.push_back(leaf(parameter->value));
  Fields fields = s.layer_case.fields ? s.layer_case.fields(kSamples, 3, s.dtype) : Fields{};
  for (auto& [name, field] : fields) {
    if (field.is_floating_point()) field = field.to(at::kDouble);
  }
  const at::Tensor y = s.layer_case.reference(x, weights, fields);
  y.backward(s.dy.defined() ? s.dy.to(at::kDouble) : s.dy);
  Gradients out{y.detach(), x.defined() ? x.grad() : x, {}};
  for (const at::Tensor& weight : weights) out.dw.push_back(weight.grad());
  return out;
}

void expect_autograd(const LayerCase& c, at::ScalarType dtype) {
  Setting s(c, dtype);
  const Gradients actual = run(s);
  const Gradients expected = autograd(s);
  expect_close(actual.y, expected.y, c.roundings, dtype, "y");
  ASSERT_EQ(actual.dx.defined(), expected.dx.defined());
  if (expected.dx.defined()) {
    expect_close(actual.dx, expected.dx, c.roundings, dtype, "dx");
    EXPECT_GT(largest(expected.dx), 0);
    EXPECT_EQ(actual.dx.scalar_type(), dtype);
  }
  for (size_t i = 0; i < expected.dw.size(); ++i) {
    expect_close(actual.dw[i], expected.dw[i], c.roundings, dtype, "d" + s.parameters[i]->name());
    EXPECT_GT(largest(expected.dw[i]), 0);
  }
  EXPECT_LT(c.roundings * unit_roundoff(dtype), 2e-4) << "this tolerance would hide a wrong term";
}

TEST_P(EveryLayer, AgreesWithAutogradInFloat64) {
  expect_autograd(GetParam(), at::kDouble);
}

TEST_P(EveryLayer, AgreesWithAutogradInFloat32) {
  expect_autograd(GetParam(), at::kFloat);
}

TEST_P(EveryLayer, AgreesWithAutogradByOperators) {
  const OperatorsEverywhere operators;
  expect_autograd(GetParam(), at::kDouble);
  expect_autograd(GetParam(), at::kFloat);
}

// d(sum(dy * y)) / d(element) from four evaluations. The error is h^4 / 30 times the fifth derivative. The
// differences of y are formed before the sum, so that outputs that do not depend on the element add no
// rounding.
double finite_difference(Setting& s, at::Tensor& tensor, int64_t element) {
  constexpr double h = 1e-3;
  double* value = tensor.mutable_data_ptr<double>() + element;
  const double start = *value;
  const auto y_at = [&](double steps) {
    *value = start + steps * h;
    return s.micro_batches.front()->evaluate(copy_of(s.x));
  };
  const at::Tensor y = 8 * (y_at(1) - y_at(-1)) - (y_at(2) - y_at(-2));
  *value = start;
  const at::Tensor weighted = s.dy.defined() ? y * s.dy : y;
  return weighted.sum().item<double>() / (12 * h);
}

// Differentiates at most this many elements of a tensor, spread over it.
constexpr int64_t kElements = 60;

// The tolerance is relative to the tensor's largest gradient. Truncation: h^4 / 30 = 3e-14 times the fifth
// derivative. No function here varies over less than half a unit (a norm of numbers near 0, because of its
// eps), so that derivative is at most 5! * 2^4 = 2e3 times the first: 6e-11. Rounding: some 10 u = 1e-15 of
// an output, which may be 100 times the gradient (a loss is a sum of 130 terms), divided by h: 1e-10.
constexpr double kFiniteDifferenceError = 1e-9;

void expect_finite_differences(Setting& s, at::Tensor& tensor, const at::Tensor& gradient,
                               const std::string& what) {
  ASSERT_EQ(gradient.sizes(), tensor.sizes()) << what;
  const double bound = kFiniteDifferenceError * largest(gradient);
  const double* actual = gradient.const_data_ptr<double>();
  const int64_t count = std::min(tensor.numel(), kElements);
  // A stride coprime to the size visits different elements in every row and column region.
  int64_t stride = std::max<int64_t>(1, tensor.numel() / count);
  while (std::gcd(stride, tensor.numel()) != 1) ++stride;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t element = i * stride % tensor.numel();
    EXPECT_NEAR(actual[element], finite_difference(s, tensor, element), bound)
        << what << " element " << element;
  }
}

TEST_P(EveryLayer, AgreesWithFiniteDifferences) {
  Setting s(GetParam(), at::kDouble);
  const Gradients actual = run(s);
  if (s.x.defined()) expect_finite_differences(s, s.x, actual.dx.contiguous(), "dx");
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    expect_finite_differences(s, s.parameters[i]->value, actual.dw[i], "d" + s.parameters[i]->name());
  }
}

// A layer may overwrite tensors that are moved in, but never those that the caller still holds. The results
// are the same.
TEST_P(EveryLayer, LeavesAloneWhatTheCallerHolds) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    Setting s(GetParam(), dtype);
    const Gradients handed_over = run(s);
    const at::Tensor x = copy_of(s.x);
    const at::Tensor dy = copy_of(s.dy);
    const Gradients held = run(s, s.x, s.dy);
    EXPECT_TRUE(same_bits(s.x, x));
    EXPECT_TRUE(same_bits(s.dy, dy));
    EXPECT_TRUE(same_bits(held.y, handed_over.y));
    EXPECT_TRUE(same_bits(held.dx, handed_over.dx));
    for (size_t i = 0; i < held.dw.size(); ++i) EXPECT_TRUE(same_bits(held.dw[i], handed_over.dw[i]));
  }
}

// The same for a tensor of which only the memory is held, through a view.
TEST_P(EveryLayer, LeavesAloneMemoryThatAViewShares) {
  Setting s(GetParam(), at::kFloat);
  at::Tensor x = copy_of(s.x);
  at::Tensor dy = copy_of(s.dy);
  const at::Tensor x_view = x.defined() ? x.view({-1}) : x;
  const at::Tensor dy_view = dy.defined() ? dy.view({-1}) : dy;
  run(s, std::move(x), std::move(dy));
  EXPECT_TRUE(same_bits(x_view, s.x.defined() ? s.x.view({-1}) : s.x));
  EXPECT_TRUE(same_bits(dy_view, s.dy.defined() ? s.dy.view({-1}) : s.dy));
}

// Returns the numbers of `t` with the last two dimensions swapped in memory.
at::Tensor swapped_in_memory(const at::Tensor& t) {
  if (!t.defined()) return t;
  return t.transpose(-1, -2).contiguous().transpose(-1, -2);
}

TEST_P(EveryLayer, TakesTensorsThatAreNotContiguous) {
  const LayerCase& c = GetParam();
  Setting s(c, at::kDouble);
  const Gradients expected = run(s);
  const Gradients actual = run(s, swapped_in_memory(s.x), swapped_in_memory(s.dy));
  // GEMM may use another algorithm for other strides, so the bits may differ.
  expect_close(actual.y, expected.y, 2 * c.roundings, at::kDouble, "y");
  if (expected.dx.defined()) expect_close(actual.dx, expected.dx, 2 * c.roundings, at::kDouble, "dx");
  for (size_t i = 0; i < expected.dw.size(); ++i) {
    expect_close(actual.dw[i], expected.dw[i], 2 * c.roundings, at::kDouble, "d" + s.parameters[i]->name());
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
