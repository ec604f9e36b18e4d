// Several micro-batches' operands of backward-p2 as those of one GEMM.
#pragma once

#include <span>

#include <ATen/ATen.h>

namespace twobp {

// The rows of (rows_i, cols) tensors below each other, copied into fresh memory; its rows are padded
// (padded_rows.h).
at::Tensor concatenate_rows(std::span<const at::Tensor> parts);

}  // namespace twobp
