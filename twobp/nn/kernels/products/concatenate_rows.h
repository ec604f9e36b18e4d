// Joins the backward-p2 operands of several micro-batches into the operands of one GEMM.
#pragma once

#include <span>

#include <ATen/ATen.h>

namespace twobp {

// Copies the rows of (rows_i, cols) tensors below each other into new memory. The rows of the result are padded
// (padded_rows.h).
at::Tensor concatenate_rows(std::span<const at::Tensor> parts);

}  // namespace twobp
