// SwiGLU (arXiv 2002.05202) on tensors: by our kernels, or by LibTorch's operators for tensors that are not
// in a CPU's memory.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// act = silu(g) * u (..., cols) from packed (..., 2 cols) = (g | u), which has even rows (padded_rows.h).
at::Tensor swiglu(const at::Tensor& packed);

// Writes dL/d(g | u) into `dx`, which has even rows and may be `packed`. dact (..., cols) is contiguous.
void swiglu_backward(const at::Tensor& packed, const at::Tensor& dact, at::Tensor& dx);

}  // namespace twobp
