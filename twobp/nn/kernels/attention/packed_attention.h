// Softmax attention of packed rows, forward and backward (the recomputing backward of FlashAttention, arXiv
// 2205.14135, algorithm 4): causal or in both directions, with padding and dropout. A block of queries is
// worked on together; a causal one meets only the keys up to its own last position, at 256 positions 5/8 of
// the products that a full tile takes. Probabilities and dropout's masks are made again in the backward:
// nothing of size S x S is kept or larger than a block. Grouped queries read their key-value head where it
// lies; nothing is repeated or copied.
//
// One task a batch entry and key-value head, its blocks in order: from two tasks on, the result does not
// depend on the number of threads. (A single task leaves the threads to the products inside it.)
#pragma once

#include <ATen/ATen.h>

#include "twobp/nn/kernels/encoder/dropout.h"

namespace twobp {

struct PackedAttention {
  int64_t heads = 1;     // H
  int64_t kv_heads = 1;  // K, divides H
  int64_t head_dim = 1;  // D
  bool causal = false;   // a query meets the keys up to its own position, not all
  at::Tensor shift;      // (B, S), added to the scores of each sample's keys; undefined: nothing
  DropoutMask dropout;   // of the probabilities; row (b H + h) S + s of the mask is query s of head h

  // A row: (q | k | v), (H + 2 K) heads.
  int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
};

// packed (B, S, (H + 2 K) D), float32 or float64 -> out (B, S, H D), log_sum_exp (B, H, S): contiguous,
// but for packed and dpacked, whose rows may be padded (padded_rows.h).
void packed_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                              at::Tensor& log_sum_exp);

// dL/dpacked from dL/dout; `dpacked` may be `packed` itself.
void packed_attention_backward(const at::Tensor& packed, const PackedAttention& attention,
                               const at::Tensor& out, const at::Tensor& log_sum_exp, const at::Tensor& dout,
                               at::Tensor& dpacked);

}  // namespace twobp
