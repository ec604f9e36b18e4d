// Mamba's layers in small odd sizes and in sizes of several chunks and groups. They run through all tests that cover
// every layer.
#include "tests/nn/layer_cases.h"
#include "tests/nn/mamba_layers.h"
#include "tests/nn/mamba_reference.h"

namespace twobp::test {
namespace {

using Weights = std::vector<at::Tensor>;

constexpr double kMambaStd = 0.5;

auto sizes(int64_t positions, int64_t cols) {
  return [=](int64_t samples) { return std::vector<int64_t>{samples, positions, cols}; };
}

LayerCase conv_case(const std::string& name, int64_t positions, int64_t channels, int64_t kernel) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return std::make_unique<CausalConv1d>("conv1d", channels, kernel, dtype); };
  c.input = sizes(positions, channels);
  c.reference = [](const at::Tensor& x, const Weights& w, const Fields&) {
    return reference::causal_conv1d(x, w[0], w[1]);
  };
  // Two sums over the kernel, and sums over rows for the weights. exp has 4 roundings, and about 12 more operations are
  // involved.
  c.roundings = static_cast<double>(2 * kernel + 3 * positions) + 16;
  return c;
}

LayerCase scan_case(const std::string& name, int64_t positions, int64_t channels, int64_t state) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return std::make_unique<PackedScan>(channels, state, dtype); };
  c.input = sizes(positions, 3 * channels + 2 * state);
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields&) {
    const auto part = x.split_with_sizes({channels, channels, state, state, channels}, 2);
    return reference::selective_scan(part[0], part[1], part[2], part[3], part[4], w[0], w[1], w[2]);
  };
  // The recurrence forward and backward (one exp and 3 operations per position), sums over states, sums over channels
  // for dB and dC, and sums over the rows of 3 samples for the parameters. Softplus, sigmoid and gate take about 30
  // operations.
  c.roundings = static_cast<double>(2 * 5 * positions + 3 * positions + 2 * state + channels) + 40;
  return c;
}

LayerCase mixer_case(const std::string& name, int64_t positions, const MambaMixerShape& shape, bool padded = false) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) {
    auto mixer = whole_mixer("mixer", shape, kMambaStd, dtype);
    make_telling(*mixer);
    return mixer;
  };
  c.input = sizes(positions, shape.dim);
  if (padded) {
    c.fields = [=](int64_t samples, uint64_t seed, at::ScalarType) {
      return Fields{{"attention_mask", random_mask(samples, positions, seed)}};
    };
  }
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields& fields) {
    return reference::mamba_mixer(x, w, shape, padded ? fields.at("attention_mask") : at::Tensor());
  };
  // The scan, and four products forward and backward.
  c.roundings = static_cast<double>(13 * positions + 2 * shape.state + shape.inner) + 56 +
                static_cast<double>(2 * (shape.dim + 3 * shape.inner + 2 * shape.dt_rank + 2 * shape.state));
  return c;
}

INSTANTIATE_TEST_SUITE_P(Mamba, EveryLayer,
                         testing::Values(conv_case("Conv1d", 5, 5, 4), conv_case("Conv1dOnePosition", 1, 3, 4),
                                         conv_case("Conv1dShorterThanKernel", 2, 3, 4),
                                         conv_case("Conv1dKernelOfOne", 3, 5, 1),
                                         conv_case("Conv1dLarge", 65, 259, 3),  // groups of 256 and 3
                                         scan_case("Scan", 3, 5, 2), scan_case("ScanTwoPositions", 2, 3, 4),
                                         scan_case("ScanOneState", 7, 2, 1), scan_case("ScanWholeChunks", 64, 16, 16),
                                         scan_case("ScanLarge", 71, 259, 5),  // 32, 32 and 7 positions
                                         mixer_case("MambaMixer", 5, {5, 10, 3, 4, 2}),
                                         mixer_case("MambaMixerTwoPositions", 2, {3, 6, 2, 4, 1}),
                                         mixer_case("MambaMixerLarge", 37, {33, 66, 16, 4, 3}),
                                         mixer_case("MambaMixerPadded", 9, {5, 10, 3, 4, 2}, true)),
                         [](const testing::TestParamInfo<LayerCase>& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::test
