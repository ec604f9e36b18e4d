#include "twobp/nn/layers/batch_norm2d.h"

namespace twobp {

Values BatchNorm2d::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  at::Tensor scales = norm_.scales(x, context);
  at::Tensor y = !context.keeps() && exclusively_owned(x) ? x : at::empty_like(x);
  norm_.apply(x, scales, y, relu_);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(x));
    saved.keep_until_p1(std::move(scales));
  }
  return {std::move(y)};
}

Values BatchNorm2d::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  const at::Tensor scales = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  const at::Tensor sums = norm_.backward_sums(dy, x, scales, relu_);
  at::Tensor dx = exclusively_owned(dy) ? dy : exclusively_owned(x) ? x : at::empty_like(x);
  norm_.backward(dy, x, scales, sums, relu_, dx);
  return {std::move(dx)};
}

}  // namespace twobp
