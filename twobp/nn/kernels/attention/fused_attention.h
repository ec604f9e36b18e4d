// Attention of a GPU's tensors by ATen's fused CUDA kernels, forward and backward: FlashAttention (arXiv
// 2307.08691) for 16-bit types, and the memory-efficient kernels (arXiv 2112.05682) for float32 and padding.
// Their bits are the same every time, because Device::open asks LibTorch for deterministic algorithms.
#pragma once

#include "twobp/nn/kernels/attention/packed_attention.h"

namespace twobp {

// Whether a kernel computes this: float32, bfloat16 or float16 on a GPU, heads of up to 256 and a multiple of
// 8 numbers, without dropout, documents and a cap.
bool takes_fused_attention(const at::Tensor& packed, const PackedAttention& attention);

// As packed_attention_forward and packed_attention_backward, for what takes_fused_attention(). `from_later`,
// the gradients of earlier keys and log_sum_exp are float32.
void fused_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                             at::Tensor& log_sum_exp);
void fused_attention_backward(const at::Tensor& packed, const PackedAttention& attention,
                              const at::Tensor& out, const at::Tensor& log_sum_exp, const at::Tensor& dout,
                              at::Tensor& dpacked);

}  // namespace twobp
