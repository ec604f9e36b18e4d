#include "twobp/nn/kernels/image/image_operators.h"

#include <limits>

#include "twobp/nn/kernels/rows/operators.h"

namespace twobp::operators {
namespace {

enum Scale : uint8_t { kMean, kRstd, kScale, kShift };

// The image's pixels as rows.
at::Tensor image_rows(const at::Tensor& image) {
  return wide(image.reshape({-1, image.size(-1)}));
}

at::Tensor scaled(const at::Tensor& x, const at::Tensor& scales) {
  return at::addcmul(scales[kShift], wide(x), scales[kScale]);
}

// The argument of max(0, ...) in channel_scale_add_relu.
at::Tensor sum_of(const at::Tensor& x, const at::Tensor& scales, const at::Tensor& other,
                  const at::Tensor& other_scales) {
  return scaled(x, scales).add_(other_scales.defined() ? scaled(other, other_scales) : wide(other));
}

at::Tensor where_above_zero(const at::Tensor& y, const at::Tensor& dy) {
  return wide(dy).masked_fill(y.gt(0).logical_not_(), 0);
}

at::Tensor gradient_before_relu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales, bool relu) {
  return relu ? where_above_zero(scaled(x, scales), dy) : wide(dy);
}

at::Tensor sums_of(const at::Tensor& g, const at::Tensor& x, const at::Tensor& scales) {
  const at::Tensor gradient = image_rows(g);
  const at::Tensor normalized = (image_rows(x) - scales[kMean]).mul_(scales[kRstd]);
  return at::stack({gradient.sum(0), (gradient * normalized).sum(0)});
}

// Calls visit(k, the pixels of the padded image under pixel k of every window).
template <typename Visit>
void for_window_pixels(const at::Tensor& padded, const WindowShape& s, Visit&& visit) {
  const int64_t height = (s.out_height() - 1) * s.stride + 1;
  const int64_t width = (s.out_width() - 1) * s.stride + 1;
  for (int64_t i = 0; i < s.kernel; ++i) {
    for (int64_t j = 0; j < s.kernel; ++j) {
      visit(i * s.kernel + j, padded.slice(1, i, i + height, s.stride).slice(2, j, j + width, s.stride));
    }
  }
}

}  // namespace

std::pair<at::Tensor, at::Tensor> channel_moments(const at::Tensor& x) {
  const auto [variance, mean] = at::var_mean(image_rows(x), at::IntArrayRef{0}, /*unbiased=*/false);
  return {mean, variance};
}

void channel_scale(const at::Tensor& x, const at::Tensor& scales, const at::Tensor& y, bool relu) {
  const at::Tensor result = scaled(x, scales);
  y.copy_(relu ? at::relu(result) : result);
}

void channel_scale_add_relu(const at::Tensor& x, const at::Tensor& scales, const at::Tensor& other,
                            const at::Tensor& other_scales, const at::Tensor& y) {
  y.copy_(at::relu(sum_of(x, scales, other, other_scales)));
}

at::Tensor channel_sums(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales, bool relu) {
  return sums_of(gradient_before_relu(dy, x, scales, relu), x, scales);
}

at::Tensor channel_sums_add_relu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales,
                                 const at::Tensor& other, const at::Tensor& other_scales, const at::Tensor& g) {
  g.copy_(where_above_zero(sum_of(x, scales, other, other_scales), dy));
  return sums_of(g, x, scales);
}

void channel_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scales, const at::Tensor& means,
                      bool relu, const at::Tensor& dx, const at::Tensor& y) {
  const at::Tensor again = y.defined() ? scaled(x, scales) : at::Tensor();
  const at::Tensor gradient = (gradient_before_relu(dy, x, scales, relu) - means[0])
                                  .sub_((wide(x) - scales[kMean]).mul_(means[1]))
                                  .mul_(scales[kScale]);
  dx.copy_(gradient);
  if (y.defined()) y.copy_(relu ? at::relu(again) : again);
}

// Goes through the window pixel by pixel, so that sums of overlapping windows have a fixed order.
void max_pool(const at::Tensor& x, const WindowShape& shape, const at::Tensor& y, const at::Tensor& where) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  y.fill_(kNone);
  where.fill_(shape.padding * (shape.kernel + 1));  // inside the image, for windows of -inf alone
  const int64_t border = shape.padding;
  const at::Tensor whole = at::constant_pad_nd(x, {0, 0, border, border, border, border}, kNone);
  for_window_pixels(whole, shape, [&](int64_t k, const at::Tensor& pixel) {
    // NaN counts as the largest, as in PyTorch.
    const at::Tensor larger = pixel.gt(y).logical_or_(pixel.ne(pixel));
    y.copy_(at::where(larger, pixel, y));
    where.masked_fill_(larger, k);
  });
}

void max_pool_backward(const at::Tensor& dy, const at::Tensor& where, const WindowShape& shape, const at::Tensor& dx) {
  const int64_t border = 2 * shape.padding;
  const at::Tensor whole = at::zeros({dx.size(0), dx.size(1) + border, dx.size(2) + border, dx.size(3)},
                                     dx.options().dtype(compute_type(dx.scalar_type())));
  for_window_pixels(whole, shape,
                    [&](int64_t k, const at::Tensor& pixel) { pixel.add_(wide(dy).masked_fill(where.ne(k), 0)); });
  dx.copy_(whole.narrow(1, shape.padding, dx.size(1)).narrow(2, shape.padding, dx.size(2)));
}

}  // namespace twobp::operators
