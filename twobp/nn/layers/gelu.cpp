#include "twobp/nn/layers/gelu.h"

#include "twobp/nn/kernels/rows.h"

namespace twobp {

void gelu_into(const at::Tensor& x, at::Tensor& y, GeluForm form) {
  dispatch_float(x.scalar_type(), "Gelu", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    S* to = mutable_numbers<S>(y);
    for_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
      encoder_kernels<S>().gelu_forward(from + begin, to + begin, end - begin, form);
    });
  });
}

void gelu_backward_into(const at::Tensor& x, const at::Tensor& dy, at::Tensor& dx, at::Tensor& act,
                        GeluForm form) {
  dispatch_float(x.scalar_type(), "Gelu", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const S* gradient = numbers<S>(dy);
    S* to = mutable_numbers<S>(dx);
    S* value = act.defined() ? mutable_numbers<S>(act) : nullptr;
    for_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
      encoder_kernels<S>().gelu_backward(from + begin, gradient + begin, to + begin,
                                         value == nullptr ? nullptr : value + begin, end - begin, form);
    });
  });
}

Values Gelu::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  at::Tensor y = context.output(x.sizes(), x.options());
  gelu_into(x, y, form_);
  if (context.keeps()) saved.keep_until_p1(std::move(x));
  return {std::move(y)};
}

Values Gelu::backward_p1(Values values, Context& context, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of Gelu, ",
              x.sizes());
  at::Tensor dx =
      context.destination == nullptr && exclusively_owned(dy) ? dy : context.output(x.sizes(), x.options());
  at::Tensor no_value;
  gelu_backward_into(x, dy, dx, no_value, form_);
  return {std::move(dx)};
}

}  // namespace twobp
