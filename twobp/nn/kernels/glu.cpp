#include "twobp/nn/kernels/glu.h"

#include "twobp/nn/kernels/encoder/encoder_kernels.h"
#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

const char* layer_of(Gate gate) {
  return gate == Gate::kSilu ? "SwiGlu" : "GeGlu";
}

GeluForm form_of(Gate gate) {
  return gate == Gate::kGelu ? GeluForm::kErf : GeluForm::kTanh;
}

}  // namespace

Gate parse_gate(const std::string& name) {
  if (name == "silu") return Gate::kSilu;
  if (name == "gelu") return Gate::kGelu;
  TWOBP_CHECK(name == "gelu_tanh", "the activation of a gated linear unit is \"", name.substr(0, 100),
              "\", but must be silu, gelu or gelu_tanh");
  return Gate::kGeluTanh;
}

at::Tensor glu(const at::Tensor& packed, Gate gate) {
  TWOBP_CHECK(packed.dim() > 0 && packed.size(-1) % 2 == 0, layer_of(gate),
              " takes gate and up packed in the last dimension, got ", packed.sizes());
  const int64_t cols = packed.size(-1) / 2;
  std::vector<int64_t> sizes = packed.sizes().vec();
  sizes.back() = cols;
  at::Tensor act = at::empty(sizes, packed.options());
  if (by_operators(packed)) {
    operators::glu_forward(packed, gate, act);
    return act;
  }
  dispatch_float(packed.scalar_type(), layer_of(gate), [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(packed);
    S* to = mutable_numbers<S>(act);
    const int64_t stride = row_stride(packed);
    for_rows(cols == 0 ? 0 : act.numel() / cols, cols, [&](int64_t begin, int64_t end) {
      const S* x = from + begin * stride;
      if (gate == Gate::kSilu) {
        kernels<S>().swiglu_forward(x, stride, to + begin * cols, end - begin, cols);
      } else {
        encoder_kernels<S>().geglu_forward(x, stride, to + begin * cols, end - begin, cols, form_of(gate));
      }
    });
  });
  return act;
}

void glu_backward(const at::Tensor& packed, const at::Tensor& dact, Gate gate, at::Tensor& dx) {
  const int64_t cols = packed.size(-1) / 2;
  std::vector<int64_t> sizes = packed.sizes().vec();
  sizes.back() = cols;
  TWOBP_CHECK(dact.sizes() == sizes, "the gradient ", dact.sizes(), " does not fit the output of ", layer_of(gate),
              ", ", at::IntArrayRef(sizes));
  if (by_operators(packed)) return operators::glu_backward(packed, dact, gate, dx);
  dispatch_float(packed.scalar_type(), layer_of(gate), [&](auto zero) {
    using S = decltype(zero);
    const S* from = numbers<S>(packed);
    const S* gradient = numbers<S>(dact);
    S* to = mutable_numbers<S>(dx);
    const int64_t stride = row_stride(packed);
    const int64_t dx_stride = row_stride(dx);
    for_rows(cols == 0 ? 0 : dact.numel() / cols, cols, [&](int64_t begin, int64_t end) {
      const S* x = from + begin * stride;
      const S* dy = gradient + begin * cols;
      S* d = to + begin * dx_stride;
      if (gate == Gate::kSilu) {
        kernels<S>().swiglu_backward(x, stride, dy, d, dx_stride, end - begin, cols);
      } else {
        encoder_kernels<S>().geglu_backward(x, stride, dy, d, dx_stride, end - begin, cols, form_of(gate));
      }
    });
  });
}

}  // namespace twobp
