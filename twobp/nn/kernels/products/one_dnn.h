// oneDNN's matrix product inside LibTorch. ATen gives float32 products to MKL, which keeps its AVX-512 code
// for Intel's CPUs: on AMD's that have AVX-512 (Zen 4 on), oneDNN takes less time. Which library multiplies
// follows from the CPU and the shapes alone, so that runs agree to the bit.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// Whether it multiplies large float32 matrices on this CPU: AMD's with AVX-512.
bool one_dnn_multiplies();

// Whether y = beta y + alpha a @ b is faster so here: on such a CPU, in float32, of matrices that are stored
// densely (a and b transposed or not), and large enough for what a call costs.
bool one_dnn_is_faster(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b);

// y = beta y + alpha a @ b: a (rows, n), b (n, cols), y (rows, cols). With beta 0, y is only written.
void one_dnn_product(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, float beta, float alpha);

}  // namespace twobp
