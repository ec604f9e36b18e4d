// Tests layers with batch statistics: batch norm, alone and fused, and a ResNet's blocks. The tests of every layer
// compare training with autograd of ATen's batch_norm; running statistics and evaluation are compared with ATen's here.
#include "twobp/nn/layers/batch_norm.h"

#include <functional>

#include "tests/nn/layer_cases.h"
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
  // Computes y (B, H', W', C) from x and the layer's parameters. Updates running statistics, if there are any, in place
  // if `training`.
  std::function<at::Tensor(const at::Tensor& x, const Weights& w, bool training)> reference;
};

std::ostream& operator<<(std::ostream& out, const BatchCase& c) {
  return out << c.name;
}

at::Tensor norm(const at::Tensor& x, const Weights& w, const std::string& name, bool training) {
  const auto statistic = [&](const std::string& key) {
    const auto found = w.find(name + key);
    return found == w.end() ? at::Tensor() : found->second;
  };
  const at::Tensor y =
      at::batch_norm(x.permute({0, 3, 1, 2}), w.at(name + ".weight"), w.at(name + ".bias"), statistic(".running_mean"),
                     statistic(".running_var"), training, 0.1, 1e-5, false);
  if (const at::Tensor count = statistic(".num_batches_tracked"); training && count.defined()) count.add_(1);
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

// The case for the tests of every layer.
LayerCase layer_case(const BatchCase& batch) {
  LayerCase c;
  c.name = batch.name;
  c.make = batch.make;
  c.batch_statistics = true;
  c.input = [sizes = batch.sizes](int64_t samples) {
    std::vector<int64_t> all = sizes;
    all[0] = samples;
    return all;
  };
  c.reference = [=](const at::Tensor& x, const std::vector<at::Tensor>& w, const Fields&) {
    const auto layer = batch.make(at::kDouble);
    Weights named;
    size_t next = 0;
    for (const Parameter* p : parameters_of(*layer)) {
      if (!p->is_buffer()) named[p->name()] = w.at(next++);
    }
    return batch.reference(x, named, true);
  };
  // The longest chain of sums. A norm divides by the deviation and subtracts the mean, so it loses a few more bits.
  c.roundings = 1600;
  return c;
}

void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  expect_within(actual, expected, 5e-5 * std::max(0.1, largest(expected)), what);
}

class BatchLayer : public testing::TestWithParam<BatchCase> {
 protected:
  // Running statistics differ from the initial ones.
  BatchLayer() : layer_(GetParam().make(at::kFloat)) {
    make_parameters(*layer_);
    for (Parameter* p : parameters_of(*layer_)) {
      if (p->is_buffer() && p->value.dim() == 1) p->value.add_(random(p->value.sizes(), 78, at::kFloat).abs_(), 0.3);
    }
  }
  static at::Tensor input(uint64_t seed) { return random(GetParam().sizes, seed, at::kFloat).mul_(1.5).add_(0.3); }
  Weights weights() const {
    Weights weights;
    for (const Parameter* p : parameters_of(*layer_))
      weights[p->name()] = p->value.is_floating_point() ? p->value.to(at::kDouble) : p->value.clone();
    return weights;
  }
  void expect_evaluation() {
    const Weights w = weights();
    const at::Tensor x = input(5);
    MicroBatch micro_batch(*layer_);
    expect_near(micro_batch.evaluate(x.clone()), GetParam().reference(x.to(at::kDouble), w, false), "y");
    EXPECT_EQ(micro_batch.saved.p1_count() + micro_batch.saved.p2_count(), 0u);
    for (const Parameter* p : parameters_of(*layer_))
      EXPECT_TRUE(same_bits(p->value, w.at(p->name()).to(p->value.scalar_type()))) << p->name();
  }

  std::unique_ptr<Layer> layer_;
};

// PyTorch's values after the same micro-batches in the same order: mean, unbiased variance, count.
TEST_P(BatchLayer, RunningStatisticsAreThoseOfTheMicroBatchesInOrder) {
  const Weights w = weights();
  std::vector<std::unique_ptr<MicroBatch>> micro_batches;
  for (uint64_t m = 0; m < 4; ++m) {
    micro_batches.push_back(std::make_unique<MicroBatch>(*layer_, Fields{}, static_cast<int64_t>(m)));
    const at::Tensor x = input(10 + m).mul_(1 + static_cast<double>(m));
    micro_batches.back()->forward(x.clone());
    GetParam().reference(x.to(at::kDouble), w, true);
  }
  for (const Parameter* p : parameters_of(*layer_)) {
    expect_near(p->value, w.at(p->name()), p->name());
    EXPECT_EQ(p->value.scalar_type(), w.at(p->name()).is_floating_point() ? at::kFloat : at::kLong) << p->name();
  }
}

TEST_P(BatchLayer, EvaluationUsesRunningStatisticsAndChangesNothing) {
  expect_evaluation();
  const OperatorsEverywhere operators;
  expect_evaluation();
}

std::vector<LayerCase> cases_of_every_layer() {
  std::vector<LayerCase> cases;
  for (const BatchCase& one : batch_cases()) cases.push_back(layer_case(one));
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Batch, EveryLayer, testing::ValuesIn(cases_of_every_layer()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Nn, BatchLayer, testing::ValuesIn(batch_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::TWOBP_FILE
