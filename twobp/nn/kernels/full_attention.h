// Softmax attention of packed rows where every query meets every key, with padding and dropout, forward and
// backward (the recomputing backward of FlashAttention, arXiv 2205.14135, algorithm 4). Probabilities and
// dropout's masks are made again in the backward: nothing of size S x S is kept or larger than a block of
// queries.
//
// A packed row holds (q | k | v), 3 H heads of D numbers. float32 or float64. One task a batch entry and
// head: from two on, the
// result does not depend on the number of threads.
#pragma once

#include <ATen/ATen.h>

#include "twobp/nn/kernels/dropout.h"

namespace twobp {

struct FullAttention {
  int64_t heads = 1;     // H
  int64_t head_dim = 1;  // D
  at::Tensor shift;      // (B, S), added to the scores of each sample's keys; undefined: nothing
  DropoutMask mask;      // of the probabilities
};

// packed (B, S, 3 H D) -> out (B, S, H D), log_sum_exp (B, H, S): all contiguous.
void full_attention_forward(const at::Tensor& packed, const FullAttention& attention, at::Tensor& out,
                            at::Tensor& log_sum_exp);

// dL/dpacked from dL/dout; `dpacked` may be `packed` itself.
void full_attention_backward(const at::Tensor& packed, const FullAttention& attention, const at::Tensor& out,
                             const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked);

}  // namespace twobp
