// Attention of packed rows on a GPU by ATen's fused CUDA kernels (fused_heads.h).
#pragma once

#include "twobp/nn/kernels/attention/packed_attention.h"

namespace twobp {

// Whether a kernel computes this: float32, bfloat16 or float16 on a GPU, heads of up to 256 and a multiple of 8
// numbers, without a cap. Dropout in slices has the mask of the whole sequence, which kernels do not draw. Documents
// take 16 bits, and neither padding nor earlier slices.
bool takes_fused_attention(const at::Tensor& packed, const PackedAttention& attention);

// As packed_attention_forward and packed_attention_backward, for what takes_fused_attention(). `from_later`, the
// gradients of earlier keys and log_sum_exp are float32.
void fused_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                             at::Tensor& log_sum_exp);
void fused_attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                              const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked);

}  // namespace twobp
