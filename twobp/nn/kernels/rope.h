// Rotary position embedding (RoFormer, arXiv 2104.09864) on tensors: by our kernels, or by LibTorch's operators for
// tensors that are not in a CPU's memory.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// Heads of a row: `count` of them, from number `first` on, `step` numbers apart.
struct RowHeads {
  int64_t count = 1;
  int64_t step = 1;
  int64_t first = 0;
};

// Rotates heads of each row of packed (batch, positions, row), which has even rows (padded_rows.h), in place. cos, sin
// (positions, half), contiguous, in the dtype of the sums. Of the first 2 * half numbers of a head, number i turns with
// number i + half; the rest stays. `back`: by the opposite angle, as gradients do.
void rope(at::Tensor& packed, const at::Tensor& cos, const at::Tensor& sin, const RowHeads& heads, bool back);

}  // namespace twobp
