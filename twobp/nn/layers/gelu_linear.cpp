#include "twobp/nn/layers/gelu_linear.h"

#include "twobp/core/check.h"

namespace twobp {

Values GeluLinear::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  const bool keeps = context.keeps();
  at::Tensor act = !keeps && exclusively_owned(x) ? x : at::empty_like(x);
  gelu_into(x, act, form_);
  Context without_input = context;
  without_input.backward = false;
  Values y = linear_.forward({std::move(act)}, without_input, saved.child(0));
  if (keeps) saved.keep_until_p1(std::move(x));
  return y;
}

Values GeluLinear::backward_p1(Values dy, Context& context, Saved& saved) {
  at::Tensor x = saved.take_p1(0);
  at::Tensor act;
  if (linear_.has_p2()) {
    act = (exclusively_owned(x) ? x : at::empty_like(x)).view({-1, x.size(-1)});
    saved.child(0).keep_until_p2(act);  // filled below; p1 of the Linear does not read it
  }
  Values dx = linear_.backward_p1(std::move(dy), context, saved.child(0));
  TWOBP_CHECK(dx[0].sizes() == x.sizes(), "the gradient ", dx[0].sizes(), " does not fit the input of GeluLinear, ",
              x.sizes());
  gelu_backward_into(x, dx[0], dx[0], act, form_);
  return dx;
}

void GeluLinear::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  linear_.collect_p2(saved.child(0), units);
}
void GeluLinear::collect_parameters(std::vector<Parameter*>& parameters) {
  linear_.collect_parameters(parameters);
}

}  // namespace twobp
