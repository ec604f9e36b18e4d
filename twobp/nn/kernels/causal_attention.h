// Causal softmax attention of packed rows, forward and backward (the recomputing backward of FlashAttention,
// arXiv 2205.14135, algorithm 4). A block of queries meets only the keys up to its own last position: at
// 256 positions that is 5/8 of the products that a full tile takes. Grouped queries read their key-value head
// where it lies; nothing is repeated or copied.
//
// A packed row holds (q | k | v), (H + 2 K) heads of D numbers. float32 or float64. One task a batch entry
// and key-value head: from two on, the
// result does not depend on the number of threads.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

struct PackedHeads {
  int64_t heads = 1;     // H
  int64_t kv_heads = 1;  // K, divides H
  int64_t head_dim = 1;  // D

  int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
};

// packed (B, S, (H + 2 K) D) -> out (B, S, H D), log_sum_exp (B, H, S): all contiguous.
void causal_attention_forward(const at::Tensor& packed, const PackedHeads& shape, at::Tensor& out,
                              at::Tensor& log_sum_exp);

// dL/dpacked from dL/dout; `dpacked` may be `packed` itself.
void causal_attention_backward(const at::Tensor& packed, const PackedHeads& shape, const at::Tensor& out,
                               const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked);

}  // namespace twobp
