#include "twobp/nn/layers/activations.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp {
namespace {

// Pieces have a fixed size for any number of threads, because exp and erf of a number at the end of a loop may be
// rounded differently from those within it.
template <typename Body>
void for_pieces(int64_t numbers, Body&& body) {
  constexpr int64_t kPiece = 4096;
  for_rows((numbers + kPiece - 1) / kPiece, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * kPiece; first < std::min(end * kPiece, numbers); first += kPiece) {
      body(first, std::min(kPiece, numbers - first));
    }
  });
}

}  // namespace

void gelu_into(const at::Tensor& x, at::Tensor& y, GeluForm form) {
  if (by_operators(x)) return operators::gelu_forward(x, y, form);
  dispatch_float(x.scalar_type(), "Gelu", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    S* to = mutable_numbers<S>(y);
    for_pieces(x.numel(), [&](int64_t first, int64_t count) {
      encoder_kernels<S>().gelu_forward(from + first, to + first, count, form);
    });
  });
}

void gelu_backward_into(const at::Tensor& x, const at::Tensor& dy, at::Tensor& dx, at::Tensor& act, GeluForm form) {
  if (by_operators(x)) return operators::gelu_backward(x, dy, dx, act, form);
  dispatch_float(x.scalar_type(), "Gelu", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(x);
    const S* gradient = numbers<S>(dy);
    S* to = mutable_numbers<S>(dx);
    S* value = act.defined() ? mutable_numbers<S>(act) : nullptr;
    for_pieces(x.numel(), [&](int64_t first, int64_t count) {
      encoder_kernels<S>().gelu_backward(from + first, gradient + first, to + first,
                                         value == nullptr ? nullptr : value + first, count, form);
    });
  });
}

Values Gelu::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = as_contiguous(std::move(values[0]));
  at::Tensor y = at::empty(x.sizes(), x.options());
  gelu_into(x, y, form_);
  if (context.keeps()) saved.keep_until_p1(std::move(x));
  return {std::move(y)};
}

Values Gelu::backward_p1(Values values, Context&, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of Gelu, ", x.sizes());
  at::Tensor dx = exclusively_owned(dy) ? dy : at::empty(x.sizes(), x.options());
  at::Tensor no_value;
  gelu_backward_into(x, dy, dx, no_value, form_);
  return {std::move(dx)};
}

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
