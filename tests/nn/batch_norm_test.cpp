// Tests layers with batch statistics: batch norm, alone and fused, and a ResNet's blocks. Training is compared with
// autograd of ATen's batch_norm and with finite differences. Running statistics are compared with ATen's after several
// micro-batches. Other tests cover evaluation, several micro-batches at once, and the saved tensors.
#include "twobp/nn/layers/batch_norm.h"

#include <functional>

#include "tests/nn/layer_test_util.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/layers/residual_block.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

using Weights = std::map<std::string, at::Tensor>;  // by name, including running statistics

struct BatchCase {
  std::string name;
  std::function<std::unique_ptr<Layer>(at::ScalarType)> make;
  std::vector<int64_t> sizes;  // of x
  // Computes y (B, H', W', C) from x and the layer's parameters. Updates running statistics in place if `training`.
  std::function<at::Tensor(const at::Tensor& x, const Weights& w, bool training)> reference;
};

std::ostream& operator<<(std::ostream& out, const BatchCase& c) {
  return out << c.name;
}

at::Tensor norm(const at::Tensor& x, const Weights& w, const std::string& name, bool training) {
  const at::Tensor y =
      at::batch_norm(x.permute({0, 3, 1, 2}), w.at(name + ".weight"), w.at(name + ".bias"),
                     w.at(name + ".running_mean"), w.at(name + ".running_var"), training, 0.1, 1e-5, false);
  if (training) w.at(name + ".num_batches_tracked").add_(1);
  return y.permute({0, 2, 3, 1});
}

at::Tensor conv(const at::Tensor& x, const at::Tensor& w, int64_t stride) {
  const int64_t p = w.size(2) / 2;
  return at::conv2d(x.permute({0, 3, 1, 2}), w, {}, {stride, stride}, {p, p}).permute({0, 2, 3, 1});
}

BatchCase norm_case(const std::string& name, std::vector<int64_t> sizes, bool relu) {
  const int64_t channels = sizes.back();
  return {name, [=](at::ScalarType dtype) { return std::make_unique<BatchNorm2d>("n", channels, relu, dtype); },
          std::move(sizes),
          [=](const at::Tensor& x, const Weights& w, bool training) {
            const at::Tensor y = norm(x, w, "n", training);
            return relu ? at::relu(y) : y;
          }};
}

BatchCase norm_conv_case(const std::string& name, std::vector<int64_t> sizes, const ConvolutionOptions& o) {
  return {name, [=](at::ScalarType dtype) { return std::make_unique<BatchNormReluConv2d>("n", "w", o, dtype); },
          std::move(sizes),
          [=](const at::Tensor& x, const Weights& w, bool training) {
            return conv(at::relu(norm(x, w, "n", training)), w.at("w"), o.stride);
          }};
}

BatchCase block_case(const std::string& name, std::vector<int64_t> sizes, const ResidualBlockOptions& o) {
  return {name, [=](at::ScalarType dtype) { return std::make_unique<ResidualBlock>("b", o, dtype); }, std::move(sizes),
          [=](const at::Tensor& x, const Weights& w, bool training) {
            const int count = o.bottleneck ? 3 : 2;
            at::Tensor y = x;
            for (int i = 0; i < count; ++i) {
              const std::string layer = "b.layer." + std::to_string(i);
              const bool strided = i == (o.bottleneck ? 1 : 0);
              y = norm(conv(y, w.at(layer + ".convolution.weight"), strided ? o.stride : 1), w,
                       layer + ".normalization", training);
              if (i + 1 < count) y = at::relu(y);
            }
            const at::Tensor shortcut = o.projects() ? norm(conv(x, w.at("b.shortcut.convolution.weight"), o.stride), w,
                                                            "b.shortcut.normalization", training)
                                                     : x;
            return at::relu(y + shortcut);
          }};
}

const std::vector<BatchCase>& batch_cases() {
  static const std::vector<BatchCase> cases = {
      norm_case("Norm", {3, 4, 5, 6}, false),
      norm_case("NormRelu", {3, 4, 5, 6}, true),
      norm_case("NormTwoRows", {2, 1, 1, 3}, false),
      norm_case("NormBlocks", {5, 7, 9, 37}, true),  // four blocks of 64 rows and one of 59
      norm_conv_case("NormConv", {2, 5, 4, 3}, {3, 6, 3, 1, 1}),
      norm_conv_case("NormConvPointwise", {2, 5, 4, 3}, {3, 6, 1, 1, 0}),
      norm_conv_case("NormConvStrided", {2, 6, 5, 3}, {3, 4, 3, 2, 1}),
      norm_conv_case("NormConvManyPixels", {2, 17, 18, 5}, {5, 6, 3, 1, 1}),
      block_case("Bottleneck", {2, 5, 4, 8}, {8, 8, 1, true}),
      block_case("BottleneckProjected", {2, 5, 4, 6}, {6, 8, 1, true}),
      block_case("BottleneckStrided", {2, 6, 5, 8}, {8, 12, 2, true}),
      block_case("BottleneckStridedOneWidth", {2, 6, 5, 8}, {8, 8, 2, true}),
      block_case("BottleneckManyPixels", {2, 17, 18, 8}, {8, 8, 1, true}),
      block_case("Basic", {2, 5, 4, 6}, {6, 6, 1, false}),
      block_case("BasicStrided", {2, 6, 5, 4}, {4, 6, 2, false}),
      block_case("BasicManyPixels", {2, 17, 18, 5}, {5, 5, 1, false}),
  };
  return cases;
}

struct Outcome {
  at::Tensor y, dx;
  std::map<std::string, at::Tensor> grads, buffers;
};

// The allowed error, relative to the largest number of the result. It follows from the longest chain of sums. A norm
// divides by the deviation and subtracts the mean, so it loses a few more bits.
double bound(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-11 : 5e-5;
}

// The error is relative to the largest number, or to 0.1 if that is larger, because small numbers may be differences of
// numbers of about 0.1.
void expect_near(const at::Tensor& actual, const at::Tensor& expected, double relative, const std::string& what) {
  expect_within(actual, expected, relative * std::max(0.1, largest(expected)), what);
}

class BatchLayer : public testing::TestWithParam<BatchCase> {
 protected:
  // One layer with its parameters, and with running statistics that differ from the initial ones.
  struct Made {
    std::unique_ptr<Layer> layer;
    std::vector<Parameter*> parameters;
  };
  static Made make(at::ScalarType dtype) {
    Made made{GetParam().make(dtype), {}};
    made.parameters = make_parameters(*made.layer);
    for (Parameter* parameter : made.parameters) {
      if (parameter->name().ends_with("running_var")) parameter->value.abs_().add_(0.5);
    }
    return made;
  }
  static at::Tensor input(uint64_t seed, at::ScalarType dtype) {
    return random(GetParam().sizes, seed, dtype).mul_(1.5).add_(0.3);
  }
  static Weights weights_of(const Made& made, bool leaves) {
    Weights weights;
    for (const Parameter* p : made.parameters) {
      if (p->is_buffer()) {
        weights[p->name()] = p->value.is_floating_point() ? p->value.to(at::kDouble, false, true) : p->value.clone();
      } else {
        weights[p->name()] = p->value.to(at::kDouble).clone().requires_grad_(leaves);
      }
    }
    return weights;
  }
  static void collect(const Made& made, Outcome& run) {
    for (const Parameter* p : made.parameters) {
      if (p->is_buffer()) {
        run.buffers[p->name()] = p->value.clone();
      } else {
        ASSERT_TRUE(p->has_grad()) << p->name();
        run.grads[p->name()] = p->grad.clone();
      }
    }
  }
  static Outcome run(Made& made, at::Tensor x, uint64_t seed, at::ScalarType dtype) {
    forget_grads(made.parameters);
    MicroBatch micro_batch(*made.layer);
    Outcome out;
    at::Tensor y = micro_batch.forward(std::move(x));
    out.y = y.clone();
    y.reset();
    out.dx = micro_batch.p1(random(out.y.sizes(), seed, dtype));
    micro_batch.p2();
    collect(made, out);
    return out;
  }
  void expect_autograd() {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      Made made = make(dtype);
      const at::Tensor x = input(3, dtype);
      const Weights w = weights_of(made, true);
      const Outcome actual = run(made, x.clone(), 4, dtype);
      const at::Tensor leaf = x.to(at::kDouble).clone().requires_grad_(true);
      const at::Tensor y = GetParam().reference(leaf, w, true);
      y.backward(random(y.sizes(), 4, dtype).to(at::kDouble));
      expect_near(actual.y, y, bound(dtype), "y");
      expect_near(actual.dx, leaf.grad(), bound(dtype), "dx");
      EXPECT_EQ(actual.dx.scalar_type(), dtype);
      EXPECT_GT(largest(leaf.grad()), 1e-3);
      for (const auto& [name, grad] : actual.grads) expect_near(grad, w.at(name).grad(), bound(dtype), "d" + name);
      for (const auto& [name, value] : actual.buffers) {
        expect_near(value, w.at(name), bound(dtype), name);
        EXPECT_EQ(value.scalar_type(), w.at(name).is_floating_point() ? dtype : at::kLong) << name;
      }
    }
  }
  void expect_evaluation() {
    Made made = make(at::kFloat);
    Weights w = weights_of(made, false);
    const at::Tensor x = input(5, at::kFloat);
    MicroBatch micro_batch(*made.layer);
    LiveBytes bytes;
    at::Tensor y = micro_batch.evaluate(x.clone());
    expect_near(y, GetParam().reference(x.to(at::kDouble), w, false), bound(at::kFloat), "y");
    EXPECT_EQ(micro_batch.saved.p1_count() + micro_batch.saved.p2_count(), 0u);
    for (const Parameter* p : made.parameters) {
      if (!p->is_buffer()) continue;
      EXPECT_TRUE(same_bits(p->value, w.at(p->name()).to(p->value.scalar_type()))) << p->name();
    }
  }
};

TEST_P(BatchLayer, AgreesWithAutograd) {
  expect_autograd();
}

TEST_P(BatchLayer, AgreesWithAutogradByOperators) {
  const OperatorsEverywhere operators;
  expect_autograd();
}

TEST_P(BatchLayer, AgreesWithFiniteDifferences) {
  Made made = make(at::kDouble);
  at::Tensor x = input(3, at::kDouble);
  const Outcome actual = run(made, x.clone(), 4, at::kDouble);
  const at::Tensor dy = random(actual.y.sizes(), 4);
  const auto loss = [&] {
    MicroBatch micro_batch(*made.layer);
    return (micro_batch.forward(x.clone()) * dy).sum().item<double>();
  };
  const auto check = [&](const at::Tensor& tensor, const at::Tensor& gradient, const std::string& what) {
    double* values = tensor.mutable_data_ptr<double>();
    const double* expected = gradient.const_data_ptr<double>();
    const int64_t step = std::max<int64_t>(1, tensor.numel() / 12);
    for (int64_t i = 0; i < tensor.numel(); i += step) {
      constexpr double h = 1e-6;  // small, so that no corner of a ReLU lies within it
      const double start = values[i];
      values[i] = start + h;
      const double above = loss();
      values[i] = start - h;
      const double below = loss();
      values[i] = start;
      EXPECT_NEAR((above - below) / (2 * h), expected[i], 2e-6 * std::max(1.0, largest(gradient)))
          << what << " element " << i;
    }
  };
  check(x, actual.dx.contiguous(), "dx");
  for (const Parameter* p : made.parameters) {
    if (!p->is_buffer()) check(p->value, actual.grads.at(p->name()), p->name());
  }
}

// PyTorch's values after the same micro-batches in the same order: mean, unbiased variance, count.
TEST_P(BatchLayer, RunningStatisticsAreThoseOfTheMicroBatchesInOrder) {
  Made made = make(at::kFloat);
  const Weights w = weights_of(made, false);
  std::vector<std::unique_ptr<MicroBatch>> micro_batches;
  for (uint64_t m = 0; m < 4; ++m) {
    micro_batches.push_back(std::make_unique<MicroBatch>(*made.layer, Fields{}, static_cast<int64_t>(m)));
    const at::Tensor x = input(10 + m, at::kFloat).mul_(1 + static_cast<double>(m));
    micro_batches.back()->forward(x.clone());
    GetParam().reference(x.to(at::kDouble), w, true);
  }
  for (const Parameter* p : made.parameters) {
    if (p->is_buffer()) expect_near(p->value, w.at(p->name()), bound(at::kFloat), p->name());
  }
}

TEST_P(BatchLayer, EvaluationUsesRunningStatisticsAndChangesNothing) {
  expect_evaluation();
  const OperatorsEverywhere operators;
  expect_evaluation();
}

// Each micro-batch has its own saved slot, so any order works. An evaluation in between changes no gradient.
TEST_P(BatchLayer, OrderOfMicroBatchesDoesNotMatter) {
  const auto results = [&](const std::string& order) {
    Made made = make(at::kFloat);
    std::vector<std::unique_ptr<MicroBatch>> micro_batches;
    for (int m = 0; m < 3; ++m) micro_batches.push_back(std::make_unique<MicroBatch>(*made.layer, Fields{}, m));
    std::vector<at::Tensor> y(3), out;
    for (size_t i = 0; i + 1 < order.size(); i += 2) {
      const int m = order[i + 1] - '0';
      MicroBatch& micro_batch = *micro_batches[m];
      if (order[i] == 'F') y[m] = micro_batch.forward(input(20 + m, at::kFloat)).clone();
      if (order[i] == 'I') out.push_back(micro_batch.p1(random(y[m].sizes(), 30 + m, at::kFloat)).clone());
      if (order[i] == 'W') micro_batch.p2();
      if (order[i] == 'E') micro_batch.evaluate(input(50, at::kFloat));
    }
    Outcome run;
    collect(made, run);
    for (const auto& one : y) out.push_back(one);
    for (const auto& [name, grad] : run.grads) out.push_back(grad);
    for (const auto& [name, buffer] : run.buffers) out.push_back(buffer);
    return out;
  };
  const auto expected = results("F0I0W0F1I1W1F2I2W2");
  for (const char* order : {"F0F1F2I0I1I2W0W1W2", "F0F1I0W0F2I1W1I2W2", "F0E0I0F1E1I1W0F2W1I2E2W2"}) {
    const auto actual = results(order);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(same_bits(actual[i], expected[i])) << order << i;
  }
}

TEST_P(BatchLayer, LeavesTheCallersTensorsAlone) {
  Made made = make(at::kFloat);
  const at::Tensor x = input(3, at::kFloat);
  const at::Tensor copy = x.clone();
  const Outcome held = run(made, x, 4, at::kFloat);
  EXPECT_TRUE(same_bits(x, copy));
  Made other = make(at::kFloat);
  forget_grads(other.parameters);
  MicroBatch micro_batch(*other.layer);
  const at::Tensor y = micro_batch.forward(copy.clone());
  const at::Tensor dy = random(y.sizes(), 4, at::kFloat);
  const at::Tensor dy_copy = dy.clone();
  const at::Tensor dx = micro_batch.p1(dy);
  EXPECT_TRUE(same_bits(dy, dy_copy));
  EXPECT_TRUE(same_bits(dx, held.dx));
  EXPECT_TRUE(same_bits(y, held.y));
}

TEST_P(BatchLayer, KeepsNothingAfterW) {
  Made made = make(at::kFloat);
  MicroBatch micro_batch(*made.layer);
  LiveBytes bytes;
  at::Tensor y = micro_batch.forward(input(3, at::kFloat));
  EXPECT_GT(bytes.now(), 0);
  const std::vector<int64_t> sizes = y.sizes().vec();
  y.reset();
  micro_batch.p1(random(sizes, 4, at::kFloat));
  micro_batch.saved.release_p1();
  micro_batch.p2();
  EXPECT_EQ(bytes.now(), 0);
}

// In a run, each micro-batch of the next step reuses the slot of the previous step.
TEST_P(BatchLayer, SavedIsReused) {
  Made made = make(at::kFloat);
  MicroBatch micro_batch(*made.layer);
  std::vector<at::Tensor> dx;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor y = micro_batch.forward(input(3, at::kFloat));
    dx.push_back(micro_batch.p1(random(y.sizes(), 4, at::kFloat)));
    micro_batch.saved.release_p1();
    micro_batch.p2();
  }
  EXPECT_TRUE(same_bits(dx[1], dx[0]));
  EXPECT_TRUE(same_bits(dx[2], dx[0]));
}

TEST_P(BatchLayer, BackwardWithoutForwardIsAnError) {
  Made made = make(at::kFloat);
  MicroBatch micro_batch(*made.layer);
  const at::Tensor y = micro_batch.evaluate(input(3, at::kFloat));
  expect_error([&] { micro_batch.p1(random(y.sizes(), 4, at::kFloat)); }, {"backward-p1", "forward"});
}

// Sums are in float32, and stored numbers have 8 or 11 bits. An output is off by a few roundings. A gradient is off by
// the roundings of the numbers whose difference it is.
TEST_P(BatchLayer, AgreesInReducedPrecision) {
  if (GetParam().name == "NormTwoRows") GTEST_SKIP() << "of two rows a norm gives 1 and -1, with no gradient";
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    Made made = make(dtype);
    Made exact = make(at::kDouble);
    for (size_t i = 0; i < made.parameters.size(); ++i) {
      if (made.parameters[i]->is_buffer()) continue;
      exact.parameters[i]->value.copy_(made.parameters[i]->value);
      EXPECT_EQ(made.parameters[i]->grad.scalar_type(), at::kFloat);
    }
    const at::Tensor x = input(3, dtype);
    MicroBatch micro_batch(*made.layer);
    MicroBatch exact_micro_batch(*exact.layer);
    const at::Tensor y = micro_batch.forward(x.clone());
    const at::Tensor exact_y = exact_micro_batch.forward(x.to(at::kDouble));
    const double unit = dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-11;
    EXPECT_EQ(y.scalar_type(), dtype);
    expect_within(y, exact_y, 8 * unit * largest(exact_y), "y");
  }
}

INSTANTIATE_TEST_SUITE_P(Nn, BatchLayer, testing::ValuesIn(batch_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::TWOBP_FILE
