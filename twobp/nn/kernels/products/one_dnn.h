// oneDNN's matrix product inside LibTorch. ATen gives float32 products to MKL, which reserves its AVX-512 code for
// Intel's CPUs. On AMD's CPUs with AVX-512 (Zen 4 on), oneDNN is faster. The choice of the library follows from the CPU
// and the shapes alone, so that runs agree to the bit.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// Whether oneDNN computes large float32 products on this CPU: true for AMD's CPUs with AVX-512.
bool one_dnn_multiplies();

// For tests: while it lives, oneDNN (true) or MKL (false) multiplies, on any CPU with AVX-512. Without that, or without
// oneDNN in LibTorch, it is always MKL. Not while other threads multiply.
class OneDnnForced {
 public:
  explicit OneDnnForced(bool multiplies);
  ~OneDnnForced();
  OneDnnForced(const OneDnnForced&) = delete;
  OneDnnForced& operator=(const OneDnnForced&) = delete;
};

// Whether oneDNN computes y = beta y + alpha a @ b faster. This holds on such a CPU, in float32, for dense matrices (a
// and b transposed or not) that are large enough to repay the cost of a call.
bool one_dnn_is_faster(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b);

// y = beta y + alpha a @ b: a (rows, n), b (n, cols), y (rows, cols). With beta 0, y is only written.
void one_dnn_product(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, float beta, float alpha);

}  // namespace twobp
