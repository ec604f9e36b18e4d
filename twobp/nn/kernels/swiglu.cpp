#include "twobp/nn/kernels/swiglu.h"

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {

at::Tensor swiglu(const at::Tensor& packed) {
  TWOBP_CHECK(packed.dim() > 0 && packed.size(-1) % 2 == 0,
              "SwiGlu takes gate and up packed in the last dimension, got ", packed.sizes());
  const int64_t cols = packed.size(-1) / 2;
  std::vector<int64_t> sizes = packed.sizes().vec();
  sizes.back() = cols;
  at::Tensor act = at::empty(sizes, packed.options());
  if (by_operators(packed)) {
    operators::swiglu_forward(packed, act);
    return act;
  }
  dispatch_float(packed.scalar_type(), "SwiGlu", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(packed);
    S* to = mutable_numbers<S>(act);
    const int64_t stride = row_stride(packed);
    for_rows(cols == 0 ? 0 : act.numel() / cols, cols, [&](int64_t begin, int64_t end) {
      kernels<S>().swiglu_forward(from + begin * stride, stride, to + begin * cols, end - begin, cols);
    });
  });
  return act;
}

void swiglu_backward(const at::Tensor& packed, const at::Tensor& dact, at::Tensor& dx) {
  const int64_t cols = packed.size(-1) / 2;
  std::vector<int64_t> sizes = packed.sizes().vec();
  sizes.back() = cols;
  TWOBP_CHECK(dact.sizes() == sizes, "the gradient ", dact.sizes(), " does not fit the output of SwiGlu, ",
              at::IntArrayRef(sizes));
  if (by_operators(packed)) return operators::swiglu_backward(packed, dact, dx);
  dispatch_float(packed.scalar_type(), "SwiGlu", [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(packed);
    const S* gradient = numbers<S>(dact);
    S* to = mutable_numbers<S>(dx);
    const int64_t stride = row_stride(packed);
    const int64_t dx_stride = row_stride(dx);
    for_rows(cols == 0 ? 0 : dact.numel() / cols, cols, [&](int64_t begin, int64_t end) {
      kernels<S>().swiglu_backward(from + begin * stride, stride, gradient + begin * cols,
                                   to + begin * dx_stride, dx_stride, end - begin, cols);
    });
  });
}

}  // namespace twobp
