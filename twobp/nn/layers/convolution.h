// A convolution's weight and the three things done with it, for the layers that own one. Images lie as
// (batch, height, width, channels), without bias, kernel x kernel pixels, zeros beyond the border.
//
// A 1 x 1 convolution is a matrix product over pixels. Others are one over gathered windows where there are
// few pixels for much weight, and for dtypes that oneDNN lacks; elsewhere, and on devices, LibTorch's, which
// needs no windows in memory.
#pragma once

#include "twobp/nn/kernels/image/image_kernels.h"
#include "twobp/nn/parameter.h"

namespace twobp {

struct ConvolutionOptions {
  int64_t in = 1, out = 1;  // channels
  int64_t kernel = 1, stride = 1, padding = 0;
};

class Convolution {
 public:
  // The weight has Hugging Face's shape (out, in, kernel, kernel) and begins as Kaiming's normal numbers for
  // a ReLU, by fan-out: deviation sqrt(2 / (kernel^2 out)), arXiv 1502.01852.
  Convolution(const std::string& name, const ConvolutionOptions& options, at::ScalarType dtype);

  // x (B, H, W, in) -> (B, H', W', out). Throws Error: another shape or dtype.
  at::Tensor forward(const at::Tensor& x) const;
  // dx from dy (B, H', W', out), for an x of these sizes. If `add_to` is defined, dx is added to it (it must
  // be of x's sizes, contiguous and the caller's own) and it is what is returned.
  at::Tensor input_gradient(const at::Tensor& dy, at::IntArrayRef x_sizes, at::Tensor add_to = {}) const;
  // dW += ...; x and dy contiguous.
  void add_weight_gradient(const at::Tensor& x, const at::Tensor& dy);

  Parameter& weight() { return weight_; }
  const Parameter& weight() const { return weight_; }
  const ConvolutionOptions& options() const { return options_; }
  std::vector<int64_t> output_sizes(at::IntArrayRef x_sizes) const;

 private:
  bool is_product() const { return options_.kernel == 1 && options_.padding == 0; }
  // Whether it is LibTorch's convolution: oneDNN's on a CPU, for an output of so many pixels.
  bool by_library(const at::Tensor& image, int64_t pixels) const;
  WindowShape window(at::IntArrayRef x_sizes) const;
  // The pixels of x that a 1 x 1 convolution reads, (rows, in).
  at::Tensor read_pixels(const at::Tensor& x) const;
  // (samples, pixels of the output * kernel^2 * in), in the dtype the products are computed in.
  at::Tensor windows(const at::Tensor& x, int64_t first, int64_t samples) const;
  int64_t samples_at_once(at::IntArrayRef x_sizes) const;

  Parameter weight_;
  ConvolutionOptions options_;
};

}  // namespace twobp
