// Our own CPU kernels for images in the layout (batch, height, width, channels): a row is a pixel, a column a channel.
// The rules of kernels.h apply: pointers are raw, a call works on the rows or the sample that it is given, and the same
// source is compiled for several instruction sets.
#pragma once

#include <cstdint>

#include "twobp/nn/kernels/instruction_sets.h"
#include "twobp/nn/kernels/number.h"

namespace twobp {

// Whether a tap of the kernel along a dimension meets a number of the image under some window, and not only zeros
// beyond the border. LibTorch's gradient of a weight, by oneDNN's kernels for bfloat16, leaves the other taps
// uninitialised: 3 taps at stride 2 over 1 number, for example.
constexpr bool tap_meets(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, int64_t tap) {
  const int64_t windows = (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
  const int64_t begin = tap * dilation - padding;                        // under the first window
  const int64_t window = begin < 0 ? (stride - 1 - begin) / stride : 0;  // the first within the image
  return window < windows && begin + window * stride < size;
}

constexpr bool every_tap_meets(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation = 1) {
  for (int64_t tap = 0; tap < kernel; ++tap) {
    if (!tap_meets(size, kernel, stride, padding, dilation, tap)) return false;
  }
  return true;
}

// How a window of `kernel` x `kernel` pixels moves over an image.
struct WindowShape {
  int64_t height = 0, width = 0, channels = 0;  // of the image
  int64_t kernel = 1, stride = 1, padding = 0;
  int64_t out_height() const { return (height + 2 * padding - kernel) / stride + 1; }
  int64_t out_width() const { return (width + 2 * padding - kernel) / stride + 1; }
  bool every_tap_meets() const {
    return twobp::every_tap_meets(height, kernel, stride, padding) &&
           twobp::every_tap_meets(width, kernel, stride, padding);
  }
};

// The numbers of a batch norm for each channel: the four rows of a (4, cols) array.
template <typename T>
struct ChannelScales {
  const T* mean;
  const T* rstd;
  const T* scale;  // gain * rstd
  const T* shift;  // bias - mean * scale
};

// S is the stored type. T is the type of the computation: float for reduced precision.
template <typename S, typename T = Compute<S>>
struct ImageKernels {
  // Mean, and sum of squared distances from the mean, over the given rows. mean, squares (cols)
  void (*channel_moments)(const S* x, T* mean, T* squares, int64_t rows, int64_t cols);

  // y = x * scale + shift, or max(0, x * scale + shift) if `relu`. y may be x.
  void (*channel_scale)(const S* x, ChannelScales<T> of, S* y, bool relu, int64_t rows, int64_t cols);

  // y = max(0, x * scale + shift + r), with r = other, or other * scale + shift of `of_other` if `of_other.scale` is
  // not null. y may be x.
  void (*channel_scale_add_relu)(const S* x, ChannelScales<T> of, const S* other, ChannelScales<T> of_other, S* y,
                                 int64_t rows, int64_t cols);

  // sums += sum of g, products += sum of g * (x - mean) * rstd over the rows, g = dy, or 0 where `relu` cut y off.
  void (*channel_sums)(const S* dy, const S* x, ChannelScales<T> of, T* sums, T* products, bool relu, int64_t rows,
                       int64_t cols);

  // The same sums after channel_scale_add_relu: g = dy where its y is above 0, else 0. g may be dy.
  void (*channel_sums_add_relu)(const S* dy, const S* x, ChannelScales<T> of, const S* other, ChannelScales<T> of_other,
                                S* g, T* sums, T* products, int64_t rows, int64_t cols);

  // dx = scale * (g - mean_g - (x - mean) * slope), g as in channel_sums. dx may be dy or x. If `y` is not null, it
  // receives the result of channel_scale. y may be x if dx is not x.
  void (*channel_backward)(const S* dy, const S* x, ChannelScales<T> of, const T* mean_g, const T* slope, S* dx, S* y,
                           bool relu, int64_t rows, int64_t cols);

  // Copies one sample x (height, width, channels) into rows (out_height * out_width, kernel * kernel * channels): the
  // pixels under each window, with zeros beyond the border.
  void (*gather_windows)(const S* x, const WindowShape& shape, S* rows);

  // The transpose: adds the rows to dx.
  void (*add_windows)(const T* rows, const WindowShape& shape, T* dx);

  // y (out_height, out_width, channels) is the largest number under each window. `where` is the index of its pixel
  // within the window, the first one if several are equal. The border is never the largest.
  void (*max_pool)(const S* x, const WindowShape& shape, S* y, uint8_t* where);

  // dx must be zero.
  void (*max_pool_backward)(const S* dy, const uint8_t* where, const WindowShape& shape, S* dx);
};

TWOBP_KERNEL_FAMILY(ImageKernels, image_kernels)

// The best kernels for this CPU.
template <typename S>
const ImageKernels<S>& image_kernels() {
  static const KernelTable<ImageKernels>& best = image_kernels_tables().best();
  return best.of<S>();
}

}  // namespace twobp
