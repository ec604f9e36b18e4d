// Softmax cross-entropy on tensors: by our kernels, or by LibTorch's operators for tensors that are not in a CPU's
// memory.
#pragma once

#include <ATen/ATen.h>

#include "twobp/nn/context.h"

namespace twobp {

// logits (..., classes) with even rows (padded_rows.h), labels (rows) int64 and contiguous, in [0, classes) or
// `ignore`, which counts nothing. Returns the sum of the losses, a float64 scalar in a CPU's memory or on the logits'
// device. If `gradient`, the logits are overwritten by scale * dL/dlogits. Throws Error for labels of another range, if
// they are in a CPU's memory. With a `cap`, the logits are cap * tanh(logits / cap).
at::Tensor cross_entropy(at::Tensor& logits, const at::Tensor& labels, int64_t ignore, const LossFactor& scale,
                         bool gradient, double cap = 0);

// logits = cap * tanh(logits / cap), in place; they have even rows.
void soft_cap(at::Tensor& logits, double cap);

}  // namespace twobp
