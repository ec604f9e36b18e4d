// Attention of a GPU's 16-bit tensors by ATen's FlashAttention kernels (arXiv 2307.08691), forward and
// backward. Their bits are the same every time, because Device::open asks LibTorch for deterministic
// algorithms.
#pragma once

#include "twobp/nn/kernels/attention/packed_attention.h"

namespace twobp {

// Whether the kernels compute this: bfloat16 or float16 on a GPU, heads of up to 256 and a multiple of 8
// numbers, without dropout, a shift, documents and a cap.
bool takes_flash_attention(const at::Tensor& packed, const PackedAttention& attention);

// As packed_attention_forward and packed_attention_backward, for what takes_flash_attention(). `from_later`
// and the gradients of earlier keys are float32, like log_sum_exp.
void flash_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                             at::Tensor& log_sum_exp);
void flash_attention_backward(const at::Tensor& packed, const PackedAttention& attention,
                              const at::Tensor& out, const at::Tensor& log_sum_exp, const at::Tensor& dout,
                              at::Tensor& dpacked);

}  // namespace twobp
