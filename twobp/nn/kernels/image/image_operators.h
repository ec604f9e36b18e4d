// The kernels of image_kernels.h by LibTorch's operators (see operators.h), on whole images (batch, height, width,
// channels). `scales` (4, channels) is the array that ChannelScales points into.
#pragma once

#include <utility>

#include <ATen/ATen.h>

#include "twobp/nn/kernels/image/image_kernels.h"

namespace twobp::operators {

// Mean and variance of each channel. The variance is not corrected for the number of samples.
std::pair<at::Tensor, at::Tensor> channel_moments(const at::Tensor& x);

void channel_scale(const at::Tensor& x, const at::Tensor& scales, const at::Tensor& y, bool relu);
// If `other_scales` is undefined, `other` is added unchanged.
void channel_scale_add_relu(const at::Tensor& x, const at::Tensor& scales, const at::Tensor& other,
                            const at::Tensor& other_scales, const at::Tensor& y);

// Both return the sums of g and of g (x - mean) rstd, (2, channels).
at::Tensor channel_sums(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales, bool relu);
at::Tensor channel_sums_add_relu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales,
                                 const at::Tensor& other, const at::Tensor& other_scales, const at::Tensor& g);

// means (2, channels): mean_g and slope.
void channel_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales, const at::Tensor& means,
                      bool relu, const at::Tensor& dx, const at::Tensor& y);

// `where` has bytes and the sizes of y.
void max_pool(const at::Tensor& x, const WindowShape& shape, const at::Tensor& y, const at::Tensor& where);
void max_pool_backward(const at::Tensor& dy, const at::Tensor& where, const WindowShape& shape, const at::Tensor& dx);

}  // namespace twobp::operators
