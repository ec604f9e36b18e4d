#include "twobp/nn/layers/rms_norm.h"

#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rms_norm.h"

namespace twobp {

RmsGain::RmsGain(std::string name, int64_t dim, at::ScalarType dtype, GainForm form)
    : Parameter({{std::move(name), dim}}, {dim}, compute_type(dtype), 0, form == GainForm::kWeight ? 1 : 0),
      form_(form) {}

RmsNorm::RmsNorm(std::string name, int64_t dim, double eps, at::ScalarType dtype, GainForm form)
    : gain_(std::move(name), dim, dtype, form), dtype_(dtype), eps_(eps) {}

Values RmsNorm::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  const int64_t cols = x.size(-1);
  TWOBP_CHECK(cols == gain_.value.numel(), "RmsNorm ", gain_.name(), " takes (..., ", gain_.value.numel(), "), got ",
              x.sizes());
  TWOBP_CHECK(x.scalar_type() == dtype_, "RmsNorm ", gain_.name(), " has dtype ", c10::toString(dtype_), ", got ",
              c10::toString(x.scalar_type()));
  auto [y, rstd] = rms_norm(x, gain_.gain(), eps_);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(x));
    saved.keep_until_p1(std::move(rstd));
  }
  return {std::move(y)};
}

Values RmsNorm::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  const at::Tensor rstd = saved.take_p1(1);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of RmsNorm ",
              gain_.name(), ", ", x.sizes());
  at::Tensor dx = exclusively_owned(dy) ? dy : at::empty(x.sizes(), x.options());
  const at::Tensor dgain = rms_norm_backward(dy, x, gain_.gain(), rstd, dx);
  if (gain_.trainable()) gain_.grad_to_add().add_(dgain);
  return {std::move(dx)};
}

void RmsNorm::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&gain_);
}

}  // namespace twobp
