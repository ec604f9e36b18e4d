// The layers for images, for the tests that cover every layer. Those with batch statistics are in
// batch_norm_test.cpp.
#include "tests/nn/layer_cases.h"
#include "twobp/nn/layers/convolution.h"

namespace twobp::test {
namespace {

using Weights = std::vector<at::Tensor>;

at::Tensor channels_second(const at::Tensor& x) {
  return x.permute({0, 3, 1, 2});
}

at::Tensor channels_last(const at::Tensor& x) {
  return x.permute({0, 2, 3, 1});
}

auto images(int64_t height, int64_t width, int64_t channels) {
  return [=](int64_t samples) { return std::vector<int64_t>{samples, height, width, channels}; };
}

LayerCase conv2d_case(const std::string& name, int64_t height, int64_t width, const ConvolutionOptions& o) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType dtype) { return std::make_unique<Conv2d>("w", o, dtype); };
  c.input = images(height, width, o.in);
  c.reference = [=](const at::Tensor& x, const Weights& w, const Fields&) {
    return channels_last(at::conv2d(channels_second(x), w[0], {}, {o.stride, o.stride}, {o.padding, o.padding}));
  };
  // Sums over a window's channels, over the outputs that use a number, and over pixels.
  const int64_t pixels = 2 * (height / o.stride + 1) * (width / o.stride + 1);
  c.roundings = static_cast<double>(std::max({o.kernel * o.kernel * std::max(o.in, o.out), pixels}) + 2);
  c.other_way_on_cpu = !WindowShape{height, width, o.in, o.kernel, o.stride, o.padding}.every_tap_meets();
  return c;
}

LayerCase max_pool_case(const std::string& name, int64_t size, int64_t channels, int64_t kernel, int64_t stride,
                        int64_t padding) {
  LayerCase c;
  c.name = name;
  c.make = [=](at::ScalarType) { return std::make_unique<MaxPool2d>(kernel, stride, padding); };
  c.input = images(size, size + 1, channels);
  c.reference = [=](const at::Tensor& x, const Weights&, const Fields&) {
    return channels_last(at::max_pool2d(channels_second(x), {kernel, kernel}, {stride, stride}, {padding, padding}));
  };
  c.roundings = static_cast<double>(kernel * kernel);  // windows that share a largest number
  return c;
}

LayerCase average_pool_case(const std::string& name, int64_t size, int64_t channels) {
  LayerCase c;
  c.name = name;
  c.make = [](at::ScalarType) { return std::make_unique<AveragePool2d>(); };
  c.input = images(size, size + 2, channels);
  c.reference = [](const at::Tensor& x, const Weights&, const Fields&) { return x.mean({1, 2}); };
  c.roundings = static_cast<double>(size * (size + 2)) + 2;
  return c;
}

std::vector<LayerCase> image_cases() {
  return {
      conv2d_case("Conv2d", 5, 4, {3, 6, 3, 1, 1}),
      conv2d_case("Conv2dPointwise", 5, 4, {3, 6, 1, 1, 0}),
      conv2d_case("Conv2dPointwiseStrided", 5, 4, {3, 6, 1, 2, 0}),
      conv2d_case("Conv2dPointwisePadded", 3, 4, {3, 2, 1, 1, 1}),
      conv2d_case("Conv2dStrided", 7, 6, {3, 5, 3, 2, 1}),
      conv2d_case("Conv2dNotPadded", 5, 4, {2, 3, 3, 1, 0}),
      conv2d_case("Conv2dOneChannel", 9, 8, {1, 4, 7, 2, 3}),
      // Taps that meet only zeros: LibTorch leaves their gradients uninitialised (every_tap_meets).
      conv2d_case("Conv2dOnePixelStrided", 1, 1, {8, 16, 3, 2, 1}),
      conv2d_case("Conv2dTwoPixelsStrided", 2, 1, {3, 4, 3, 2, 1}),
      conv2d_case("Conv2dManyPixels", 17, 18, {5, 7, 3, 1, 1}),  // oneDNN in float32
      conv2d_case("Conv2dManyPixelsStrided", 34, 33, {3, 5, 7, 2, 3}),
      max_pool_case("MaxPool2d", 5, 3, 3, 2, 1),
      max_pool_case("MaxPool2dNotOverlapping", 6, 17, 2, 2, 0),
      max_pool_case("MaxPool2dOverlapping", 4, 5, 3, 1, 1),
      average_pool_case("AveragePool2d", 3, 5),
      average_pool_case("AveragePool2dLarge", 9, 67),
  };
}

INSTANTIATE_TEST_SUITE_P(Images, EveryLayer, testing::ValuesIn(image_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace twobp::test
