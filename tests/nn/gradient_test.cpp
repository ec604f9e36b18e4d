// Compares the output, input gradient and parameter gradients of every layer with finite differences in float64, and
// with autograd of a reference in float64 and float32.
#include "tests/nn/layer_cases.h"
#include "twobp/nn/check_layer.h"
#include "twobp/nn/kernels/rows/operators.h"

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

// The step is larger than for a layer with kinks, so that rounding disturbs less. The tolerance is relative to the
// tensor's largest gradient. Truncation: h^4 / 30 = 3e-14 times the fifth derivative. No function here varies over less
// than half a unit (a norm of numbers near 0, because of its eps), so that derivative is at most 5! * 2^4 = 2e3 times
// the first: 6e-11. Rounding: some 10 u = 1e-15 of an output, which may be 100 times the gradient (a loss is a sum of
// 130 terms), divided by h: 1e-10.
TEST_P(EveryLayer, AgreesWithFiniteDifferences) {
  const LayerCase& c = GetParam();
  const auto layer = c.make(at::kDouble);
  LayerCheck options;
  if (c.fields) options.fields = c.fields(kSamples, 3, at::kDouble);
  if (c.is_loss()) options.loss_weight = c.loss_weight;
  options.step = c.batch_statistics ? 1e-6 : 1e-3;  // the ReLU after such a norm has a corner
  options.tolerance = c.batch_statistics ? 5e-6 : 1e-9;
  check_layer(*layer, values_of(c.make_input(kSamples, 3, at::kDouble)), options);
}

// A layer may overwrite tensors that are moved in, but never those that the caller still holds. The results are the
// same.
TEST_P(EveryLayer, LeavesTheCallersTensorsAlone) {
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

// The same holds if the caller has only a view of the memory.
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
