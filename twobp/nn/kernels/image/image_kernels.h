// Our own CPU kernels for images, which lie as (batch, height, width, channels): a row is a pixel, a column a
// channel. As in kernels.h: raw pointers, a call works on the rows or the sample it is given, the same source
// is compiled for several instruction sets.
#pragma once

#include <cstdint>

#include "twobp/nn/kernels/instruction_sets.h"
#include "twobp/nn/kernels/number.h"

namespace twobp {

// How a window of `kernel` x `kernel` pixels moves over an image.
struct WindowShape {
  int64_t height = 0, width = 0, channels = 0;  // of the image
  int64_t kernel = 1, stride = 1, padding = 0;
  int64_t out_height() const { return (height + 2 * padding - kernel) / stride + 1; }
  int64_t out_width() const { return (width + 2 * padding - kernel) / stride + 1; }
};

// What a batch norm makes of a channel, (4, cols) one below the other.
template <typename T>
struct ChannelScales {
  const T* mean;
  const T* rstd;
  const T* scale;  // gain * rstd
  const T* shift;  // bias - mean * scale
};

// S: as stored; T: as computed with, float for reduced precision.
template <typename S, typename T = Compute<S>>
struct ImageKernels {
  // Over the rows given: mean and sum of squared distances from it. mean, squares (cols)
  void (*channel_moments)(const S* x, T* mean, T* squares, int64_t rows, int64_t cols);

  // y = x * scale + shift, and the larger of that and 0 if `relu`. y may be x.
  void (*channel_scale)(const S* x, ChannelScales<T> of, S* y, bool relu, int64_t rows, int64_t cols);

  // y = max(0, x * scale + shift + r), r = other * scale + shift of its own if `of_other.scale` is given.
  // y may be x.
  void (*channel_scale_add_relu)(const S* x, ChannelScales<T> of, const S* other, ChannelScales<T> of_other,
                                 S* y, int64_t rows, int64_t cols);

  // sums += sum of g, products += sum of g * (x - mean) * rstd over the rows, g = dy, or 0 where `relu` cut
  // y.
  void (*channel_sums)(const S* dy, const S* x, ChannelScales<T> of, T* sums, T* products, bool relu,
                       int64_t rows, int64_t cols);

  // The same behind channel_scale_add_relu: g = dy where its y is above 0, else 0. g may be dy.
  void (*channel_sums_add_relu)(const S* dy, const S* x, ChannelScales<T> of, const S* other,
                                ChannelScales<T> of_other, S* g, T* sums, T* products, int64_t rows,
                                int64_t cols);

  // dx = scale * (g - mean_g - (x - mean) * slope), g as in channel_sums. dx may be dy or x. If `y` is given,
  // it gets what channel_scale computes, and may be x, unless dx is.
  void (*channel_backward)(const S* dy, const S* x, ChannelScales<T> of, const T* mean_g, const T* slope,
                           S* dx, S* y, bool relu, int64_t rows, int64_t cols);

  // One sample x (height, width, channels) into rows (out_height * out_width, kernel * kernel * channels):
  // the pixels under each window, zeros beyond the border.
  void (*gather_windows)(const S* x, const WindowShape& shape, S* rows);

  // The transpose: adds the rows' numbers to dx.
  void (*add_windows)(const T* rows, const WindowShape& shape, T* dx);

  // y (out_height, out_width, channels): the largest number under each window; where: which pixel of the
  // window it is, the first if several are. The border is never the largest.
  void (*max_pool)(const S* x, const WindowShape& shape, S* y, uint8_t* where);

  // dx must be zero.
  void (*max_pool_backward)(const S* dy, const uint8_t* where, const WindowShape& shape, S* dx);
};

TWOBP_KERNEL_FAMILY(ImageKernels, image_kernels)

// The best for this CPU.
template <typename S>
const ImageKernels<S>& image_kernels() {
  static const KernelTable<ImageKernels>& best = image_kernels_tables().best();
  return best.of<S>();
}

}  // namespace twobp
