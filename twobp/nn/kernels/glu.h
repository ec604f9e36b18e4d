// Gated linear units (arXiv 2002.05202) on tensors: by our kernels, or by LibTorch's operators for tensors that are not
// in a CPU's memory.
#pragma once

#include <string>

#include <ATen/ATen.h>

#include "twobp/nn/kernels/gate.h"

namespace twobp {

// "silu", "gelu" (exact), "gelu_tanh". Throws Error that lists them for other names.
Gate parse_gate(const std::string& name);

// act = gate(g) * u (..., cols) from packed (..., 2 cols) = (g | u), which has even rows (padded_rows.h).
at::Tensor glu(const at::Tensor& packed, Gate gate);

// Writes dL/d(g | u) into `dx`, which has even rows and may be `packed`. dact (..., cols) is contiguous.
void glu_backward(const at::Tensor& packed, const at::Tensor& dact, Gate gate, at::Tensor& dx);

}  // namespace twobp
