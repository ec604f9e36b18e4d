// BERT's layers in plain ATen operators, as a reference that autograd differentiates. Used in float64.
#pragma once

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "twobp/nn/kernels/rows/row_kernels.h"
#include "twobp/nn/layers/attention.h"

namespace twobp::test::reference {

inline at::Tensor affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return at::matmul(x, weight.t()) + bias;
}

inline at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& gain, const at::Tensor& bias, double eps) {
  const at::Tensor off = x - x.mean(-1, true);
  return off / at::sqrt(off.square().mean(-1, true) + eps) * gain + bias;
}

inline at::Tensor gelu(const at::Tensor& x, GeluForm form) {
  if (form == GeluForm::kErf) return x * 0.5 * (1 + at::erf(x / std::sqrt(2.0)));
  return 0.5 * x * (1 + at::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x.pow(3))));
}

// Packed (q | k | v), (B, S, 3 H D) -> (B, S, H D). `mask` (B, S) is 0 for padding. The probabilities are multiplied by
// `kept` (B, H, S, S). Either may be undefined.
inline at::Tensor bidirectional_attention(const at::Tensor& packed, const BidirectionalAttentionShape& shape,
                                          const at::Tensor& mask = {}, const at::Tensor& kept = {}) {
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const auto heads = [&](int64_t which) {
    return packed.narrow(2, which * shape.width(), shape.width())
        .view({batch, positions, shape.heads, shape.head_dim})
        .transpose(1, 2);
  };
  at::Tensor scores = at::matmul(heads(0), heads(1).transpose(2, 3)) / std::sqrt(static_cast<double>(shape.head_dim));
  if (mask.defined()) {
    scores = scores.masked_fill(mask.eq(0).view({batch, 1, 1, positions}), -std::numeric_limits<double>::infinity());
  }
  at::Tensor p = at::softmax(scores, -1);
  if (kept.defined()) p = p * kept;
  return at::matmul(p, heads(2)).transpose(1, 2).reshape({batch, positions, shape.width()});
}

}  // namespace twobp::test::reference
