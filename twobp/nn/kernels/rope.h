// Rotary position embedding (RoFormer, arXiv 2104.09864) on tensors: by our kernels, or by LibTorch's
// operators for tensors that are not in a CPU's memory.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// Rotates the first `heads` heads of each row of packed (batch, positions, row), which has even rows
// (padded_rows.h), in place. cos, sin (positions, head_dim / 2), contiguous, in the dtype of the sums. Number
// i of a head turns with number i + head_dim / 2. `back`: by the opposite angle, as gradients do.
void rope(at::Tensor& packed, const at::Tensor& cos, const at::Tensor& sin, int64_t heads, bool back);

}  // namespace twobp
