#include "twobp/nn/kernels/image/image_operators.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/layers/convolution.h"

namespace twobp {
namespace {

// Calls body(first sample, last sample).
template <typename Body>
void for_samples(int64_t samples, Body&& body) {
  at::parallel_for(0, samples, 1, std::forward<Body>(body));
}

int64_t numbers_per_sample(const at::Tensor& image) {
  return image.numel() / image.size(0);
}

// The same function as in operators, but by the kernels.
void max_pool(const at::Tensor& x, const WindowShape& shape, const at::Tensor& y, const at::Tensor& where) {
  dispatch_float(x.scalar_type(), "MaxPool2d", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    S* to = mutable_numbers<S>(y);
    uint8_t* at = where.mutable_data_ptr<uint8_t>();
    for_samples(x.size(0), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        image_kernels<S>().max_pool(from + i * numbers_per_sample(x), shape, to + i * numbers_per_sample(y),
                                    at + i * numbers_per_sample(y));
      }
    });
  });
}

void max_pool_backward(const at::Tensor& dy, const at::Tensor& where, const WindowShape& shape, const at::Tensor& dx) {
  dispatch_float(dy.scalar_type(), "MaxPool2d", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(dy);
    const uint8_t* at = where.const_data_ptr<uint8_t>();
    S* to = mutable_numbers<S>(dx);
    for_samples(dx.size(0), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        image_kernels<S>().max_pool_backward(from + i * numbers_per_sample(dy), at + i * numbers_per_sample(dy), shape,
                                             to + i * numbers_per_sample(dx));
      }
    });
  });
}

}  // namespace

MaxPool2d::MaxPool2d(int64_t kernel, int64_t stride, int64_t padding) {
  TWOBP_CHECK(kernel >= 1 && kernel <= 15 && stride >= 1 && padding >= 0 && 2 * padding <= kernel,
              "max pooling takes a kernel of 1 to 15, a stride of at least 1 and padding of at most half the "
              "kernel, got ",
              kernel, ", ", stride, " and ", padding);
  window_.kernel = kernel;
  window_.stride = stride;
  window_.padding = padding;
}

Values MaxPool2d::forward(Values values, Context& context, Saved& saved) {
  const at::Tensor x = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(x.dim() == 4 && x.numel() > 0 && std::min(x.size(1), x.size(2)) + 2 * window_.padding >= window_.kernel,
              "max pooling with a kernel of ", window_.kernel,
              " takes (batch, height, width, channels) of at least that size, got ", x.sizes());
  WindowShape shape = window_;
  shape.height = x.size(1);
  shape.width = x.size(2);
  shape.channels = x.size(3);
  const std::vector<int64_t> sizes = {x.size(0), shape.out_height(), shape.out_width(), shape.channels};
  at::Tensor y = at::empty(sizes, x.options());
  at::Tensor where = at::empty(sizes, x.options().dtype(at::kByte));
  if (by_operators(x)) {
    operators::max_pool(x, shape, y, where);
  } else {
    max_pool(x, shape, y, where);
  }
  if (context.keeps()) {
    saved.keep_until_p1(std::move(where));
    saved.keep_until_p1(at::empty({1}, x.options()).expand(x.sizes()));  // keeps only x's sizes
  }
  return {std::move(y)};
}

Values MaxPool2d::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor where = saved.take_p1(0);
  const at::Tensor x = saved.take_p1(1);
  const at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == where.sizes(), "the gradient ", dy.sizes(), " does not fit the output of max pooling, ",
              where.sizes());
  WindowShape shape = window_;
  shape.height = x.size(1);
  shape.width = x.size(2);
  shape.channels = x.size(3);
  at::Tensor dx = at::zeros(x.sizes(), dy.options());
  if (by_operators(dy)) {
    operators::max_pool_backward(dy, where, shape, dx);
  } else {
    max_pool_backward(dy, where, shape, dx);
  }
  return {std::move(dx)};
}

Values AveragePool2d::forward(Values values, Context& context, Saved& saved) {
  const at::Tensor& x = values[0];
  TWOBP_CHECK(x.dim() == 4 && x.numel() > 0, "average pooling takes (batch, height, width, channels), got ", x.sizes());
  at::Tensor y = at::empty({x.size(0), x.size(3)}, x.options());
  at::mean_out(y, x, {1, 2}, /*keepdim=*/false, x.scalar_type());
  if (context.keeps()) saved.keep_until_p1(at::empty({1}, x.options()).expand(x.sizes()));  // x's sizes
  return {std::move(y)};
}

Values AveragePool2d::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  TWOBP_CHECK(values[0].dim() == 2 && values[0].size(0) == x.size(0) && values[0].size(1) == x.size(3), "the gradient ",
              values[0].sizes(), " does not fit the output of average pooling of ", x.sizes());
  const at::Tensor share = values[0] / static_cast<double>(x.size(1) * x.size(2));
  return {share.view({x.size(0), 1, 1, x.size(3)}).expand(x.sizes()).contiguous()};
}

Values ImageInput::forward(Values values, Context& context, Saved&) {
  at::Tensor x = values[0].dim() == 3 ? values[0].unsqueeze(1) : values[0];
  TWOBP_CHECK(x.dim() == 4 && x.size(1) == channels_ && x.is_floating_point() && x.numel() > 0,
              "pixel_values must be floating point numbers (batch, ", channels_, ", height, width), they are ",
              c10::toString(x.scalar_type()), " ", values[0].sizes(), " in micro-batch ", context.micro_batch);
  return {x.permute({0, 2, 3, 1}).to(dtype_).contiguous()};
}

}  // namespace twobp
