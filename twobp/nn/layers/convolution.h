// Layers of pictures (batch, height, width, channels): convolution and pooling.
#pragma once

#include "twobp/nn/kernels/image/image_kernels.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/parameter.h"

namespace twobp {

struct ConvolutionOptions {
  int64_t in = 1, out = 1;  // channels
  int64_t kernel = 1, stride = 1, padding = 0;
};

class Convolution {
 public:
  // The weight has Hugging Face's shape (out, in, kernel, kernel). It starts as Kaiming's normal numbers for a ReLU, by
  // fan-out: deviation sqrt(2 / (kernel^2 out)), arXiv 1502.01852.
  Convolution(const std::string& name, const ConvolutionOptions& options, at::ScalarType dtype);

  // x (B, H, W, in) -> (B, H', W', out). Throws Error for another shape or dtype.
  at::Tensor forward(const at::Tensor& x) const;
  // dx from dy (B, H', W', out), for an x of these sizes. If `add_to` is defined, dx is added to it and it is returned.
  // It must have x's sizes, be contiguous and belong to the caller.
  at::Tensor input_gradient(const at::Tensor& dy, at::IntArrayRef x_sizes, at::Tensor add_to = {}) const;
  // dW += ...; x and dy are contiguous.
  void add_weight_gradient(const at::Tensor& x, const at::Tensor& dy);

  Parameter& weight() { return weight_; }
  const Parameter& weight() const { return weight_; }
  const ConvolutionOptions& options() const { return options_; }
  std::vector<int64_t> output_sizes(at::IntArrayRef x_sizes) const;

 private:
  bool is_product() const { return options_.kernel == 1 && options_.padding == 0; }
  // Whether LibTorch's convolution is used: oneDNN's on a CPU, for an output of `pixels` pixels from an x of these
  // sizes. Never on a CPU where a tap meets only zeros (every_tap_meets).
  bool by_library(const at::Tensor& image, at::IntArrayRef x_sizes, int64_t pixels) const;
  // The ways of input_gradient where the convolution is a product, and without LibTorch.
  at::Tensor gradient_of_product(const at::Tensor& dy, at::IntArrayRef x_sizes, at::Tensor add_to) const;
  at::Tensor gradient_of_windows(const at::Tensor& dy, at::IntArrayRef x_sizes, at::Tensor add_to) const;
  WindowShape window(at::IntArrayRef x_sizes) const;
  // The pixels of x that a 1 x 1 convolution reads, (rows, in).
  at::Tensor read_pixels(const at::Tensor& x) const;
  // Gathered windows (samples, pixels of the output * kernel^2 * in), in the dtype of the products.
  at::Tensor windows(const at::Tensor& x, int64_t first, int64_t samples) const;
  int64_t samples_at_once(at::IntArrayRef x_sizes) const;

  Parameter weight_;
  ConvolutionOptions options_;
};

// Convolution of images (batch, height, width, channels), without bias.
//   p1: dx        p2: dW += ...
class Conv2d : public Layer {
 public:
  // `gives_gradient` is false for a model's first layer. Its backward-p1 computes no dx and returns nothing.
  Conv2d(const std::string& name, const ConvolutionOptions& options, at::ScalarType dtype, bool gives_gradient = true)
      : convolution_(name, options, dtype), gives_gradient_(gives_gradient) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  // The same, with dx added to `add_to` (see Convolution::input_gradient).
  Values backward_p1(at::Tensor dy, Saved& saved, at::Tensor add_to);
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  bool p2_reads_other_weights() const override { return false; }
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  Convolution convolution_;
  bool gives_gradient_;
};

// Pooling of images (batch, height, width, channels): the largest number under a moving window, and the mean of the
// whole image.

// (B, H, W, C) -> (B, H', W', C). Keeps one byte per output number: the index of the largest pixel within its window.
class MaxPool2d : public Layer {
 public:
  // The window has at most 15 x 15 pixels. The padding is at most half of that, as in PyTorch.
  MaxPool2d(int64_t kernel, int64_t stride, int64_t padding);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;

 private:
  WindowShape window_;  // its image size is not set
};

// (B, H, W, C) -> (B, C): adaptive average pooling to one pixel.
class AveragePool2d : public Layer {
 public:
  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
};

// The first layer of an image model. Takes pixel_values (B, C, H, W), or (B, H, W) of one channel. Returns them in the
// dtype and the layout of the other layers, (B, H, W, C). Has no backward pass.
class ImageInput : public Layer {
 public:
  ImageInput(int64_t channels, at::ScalarType dtype) : channels_(channels), dtype_(dtype) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values, Context&, Saved&) override { return {}; }

 private:
  int64_t channels_;
  at::ScalarType dtype_;
};

}  // namespace twobp
