#include "twobp/nn/layers/swiglu.h"

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {

Values SwiGlu::forward(Values values, Context& context, Saved& saved) {
  at::Tensor x = with_even_rows(std::move(values[0]));
  TWOBP_CHECK(x.size(-1) % 2 == 0, "SwiGlu takes gate and up packed in the last dimension, got ", x.sizes());
  const int64_t cols = x.size(-1) / 2;
  const int64_t rows = x.numel() / (2 * cols);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = cols;
  at::Tensor act = at::empty(sizes, x.options());
  if (by_operators(x)) {
    operators::swiglu_forward(x, act);
  } else {
    dispatch_float(x.scalar_type(), "SwiGlu", [&](auto zero) {
      using S = decltype(zero);
      const S* from = numbers<S>(x);
      S* to = mutable_numbers<S>(act);
      const int64_t stride = row_stride(x);
      for_rows(rows, cols, [&](int64_t begin, int64_t end) {
        kernels<S>().swiglu_forward(from + begin * stride, stride, to + begin * cols, end - begin, cols);
      });
    });
  }
  if (context.keeps()) saved.keep_until_p1(std::move(x));
  return {std::move(act)};
}

Values SwiGlu::backward_p1(Values values, Context&, Saved& saved) {
  at::Tensor x = saved.take_p1(0);
  const at::Tensor dact = as_contiguous(std::move(values[0]));
  const int64_t cols = x.size(-1) / 2;
  const int64_t rows = x.numel() / (2 * cols);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = cols;
  TWOBP_CHECK(dact.sizes() == sizes, "the gradient ", dact.sizes(), " does not fit the output of SwiGlu, ",
              at::IntArrayRef(sizes));
  at::Tensor dx = exclusively_owned(x) ? x : at::empty(x.sizes(), x.options());
  if (by_operators(x)) {
    operators::swiglu_backward(x, dact, dx);
  } else {
    dispatch_float(x.scalar_type(), "SwiGlu", [&](auto zero) {
      using S = decltype(zero);
      const S* from = numbers<S>(x);
      const S* gradient = numbers<S>(dact);
      S* to = mutable_numbers<S>(dx);
      const int64_t stride = row_stride(x);
      const int64_t dx_stride = row_stride(dx);
      for_rows(rows, cols, [&](int64_t begin, int64_t end) {
        kernels<S>().swiglu_backward(from + begin * stride, stride, gradient + begin * cols,
                                     to + begin * dx_stride, dx_stride, end - begin, cols);
      });
    });
  }
  return {std::move(dx)};
}

}  // namespace twobp
