#include "twobp/nn/layers/gelu.h"

#include <algorithm>

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/rows.h"

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

}  // namespace twobp
