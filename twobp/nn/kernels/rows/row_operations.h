// Operations on rows of tensors: by our kernels, or by LibTorch's operators for tensors that are not in a CPU's memory.
#pragma once

#include <string>
#include <utility>

#include <ATen/ATen.h>

#include "twobp/nn/context.h"
#include "twobp/nn/kernels/rows/row_arguments.h"

namespace twobp {

// x (..., cols), contiguous; gain (cols), float32 if x has a 16-bit type. Returns y = x * rstd * gain, of x's shape and
// dtype, and rstd (rows), of gain's dtype.
std::pair<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& gain, double eps);

// Writes dL/dx into `dx`, which may be `dy`. Returns dL/dgain. All of x's shape are contiguous.
at::Tensor rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain, const at::Tensor& rstd,
                             at::Tensor& dx);

// The same of several norms that lie side by side in each row: x, y (rows, norms * cols) with dense rows at any
// distance, gain (cols), rstd (rows * norms). `dx` may be `dy`.
void rms_norm_rows(const at::Tensor& x, const at::Tensor& gain, double eps, at::Tensor& y, at::Tensor& rstd);
at::Tensor rms_norm_rows_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gain,
                                  const at::Tensor& rstd, at::Tensor& dx);

// Gated linear units, arXiv 2002.05202.

// "silu", "gelu" (exact), "gelu_tanh". Throws Error that lists them for other names.
Gate parse_gate(const std::string& name);

// act = gate(g) * u (..., cols) from packed (..., 2 cols) = (g | u), which has even rows (padded_rows.h).
at::Tensor glu(const at::Tensor& packed, Gate gate);

// Writes dL/d(g | u) into `dx`, which has even rows and may be `packed`. dact (..., cols) is contiguous.
void glu_backward(const at::Tensor& packed, const at::Tensor& dact, Gate gate, at::Tensor& dx);

// Rotary position embedding, RoFormer, arXiv 2104.09864.

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

// Softmax cross-entropy.

// logits (..., classes) with even rows (padded_rows.h), labels (rows) int64 and contiguous, in [0, classes) or
// `ignore`, which counts nothing. Returns the sum of the losses, a float64 scalar in a CPU's memory or on the logits'
// device. If `gradient`, the logits are overwritten by scale * dL/dlogits. Throws Error for labels of another range, if
// they are in a CPU's memory. With a `cap`, the logits are cap * tanh(logits / cap).
at::Tensor cross_entropy(at::Tensor& logits, const at::Tensor& labels, int64_t ignore, const LossFactor& scale,
                         bool gradient, double cap = 0);

// logits = cap * tanh(logits / cap), in place; they have even rows.
void soft_cap(at::Tensor& logits, double cap);

}  // namespace twobp
