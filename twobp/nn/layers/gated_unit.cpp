#include "twobp/nn/layers/gated_unit.h"

#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {

Values GatedUnit::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = with_even_rows(std::move(values[0]));
  at::Tensor act = glu(x, gate_);
  if (context.keeps()) saved.keep_until_p1(std::move(x));
  return {std::move(act)};
}

Values GatedUnit::backward_p1(Values values, Context&, Saved& saved) {
  at::Tensor x = saved.take_p1(0);
  const at::Tensor dact = as_contiguous(std::move(values[0]));
  at::Tensor dx = exclusively_owned(x) ? x : at::empty(x.sizes(), x.options());
  glu_backward(x, dact, gate_, dx);
  return {std::move(dx)};
}

}  // namespace twobp
