// RMSNorm (arXiv 1910.07467, eq. 4) on tensors: by our kernels, or by LibTorch's operators for tensors that are not in
// a CPU's memory.
#pragma once

#include <utility>

#include <ATen/ATen.h>

namespace twobp {

// x (..., cols), contiguous; gain (cols), float32 if x has a 16-bit type. Returns y = x * rstd * gain, of x's shape and
// dtype, and rstd (rows), of gain's dtype.
std::pair<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& gain, double eps);

// Writes dL/dx into `dx`, which may be `dy`. Returns dL/dgain. All of x's shape are contiguous.
at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain, const at::Tensor& rstd,
                             at::Tensor& dx);

}  // namespace twobp
