// The layers in plain ATen operators, with attention written out, as a reference that autograd differentiates. Used in
// float64.
#pragma once

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "twobp/nn/layers/attention.h"

namespace twobp::test::reference {

inline at::Tensor linear(const at::Tensor& x, const at::Tensor& weight) {
  return at::matmul(x, weight.t());
}

inline at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& gain, double eps) {
  return x / at::sqrt(x.square().mean(-1, true) + eps) * gain;
}

// Packed (g | u).
inline at::Tensor swiglu(const at::Tensor& x) {
  const int64_t cols = x.size(-1) / 2;
  return at::silu(x.narrow(-1, 0, cols)) * x.narrow(-1, cols, cols);
}

// x (B, H, S, D): x cos + rotate_half(x) sin, as in transformers' modeling_llama.
inline at::Tensor rope(const at::Tensor& x, double theta) {
  const int64_t half = x.size(3) / 2;
  const at::Tensor exponent = at::arange(half, x.options()) / static_cast<double>(half);
  const at::Tensor frequency = at::exp(exponent * -std::log(theta));
  const at::Tensor angle = at::outer(at::arange(x.size(2), x.options()), frequency).repeat({1, 2});  // (S, D)
  const at::Tensor rotated = at::cat({-x.narrow(3, half, half), x.narrow(3, 0, half)}, 3);
  return x * angle.cos() + rotated * angle.sin();
}

// Of the first `dims` numbers of a head, or of the `last`.
inline at::Tensor rope(const at::Tensor& x, double theta, int64_t dims, bool last = false) {
  if (dims == 0) return x;
  const int64_t rest = x.size(3) - dims;
  if (last) return at::cat({x.narrow(3, 0, rest), rope(x.narrow(3, rest, dims), theta)}, 3);
  return at::cat({rope(x.narrow(3, 0, dims), theta), x.narrow(3, dims, x.size(3) - dims)}, 3);
}

// cap * tanh(x / cap), or x without a cap.
inline at::Tensor soft_cap(const at::Tensor& x, double cap) {
  return cap > 0 ? cap * at::tanh(x / cap) : x;
}

// Packed (q | k | v), (B, S, H D + K (D + V)) -> (B, S, H V). `mask` (B, S) is 0 for padding, and may be undefined.
// `sinks` (H) are scores without a value.
inline at::Tensor attention(const at::Tensor& packed, const AttentionShape& shape, const at::Tensor& mask = {},
                            const at::Tensor& starts = {}, const at::Tensor& sinks = {}) {
  const int64_t batch = packed.size(0);
  const int64_t positions = packed.size(1);
  const at::Tensor rows =
      shape.interleaved ? packed.view({batch, positions, shape.heads, 3, shape.head_dim}).transpose(2, 3).flatten(2)
                        : packed;
  const int64_t values = shape.value_dim > 0 ? shape.value_dim : shape.head_dim;
  const auto heads = [&](int64_t first, int64_t count, int64_t dim) {
    return rows.narrow(2, first * shape.head_dim, count * dim).reshape({batch, positions, count, dim}).transpose(1, 2);
  };
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t dims = shape.rotary_dims();
  const auto turned = [&](int64_t first, int64_t count) {
    return rope(heads(first, count, shape.head_dim), shape.rope.theta, dims, shape.rotary_last);
  };
  const at::Tensor q = turned(0, shape.heads);
  const at::Tensor k = turned(shape.heads, shape.kv_heads).repeat_interleave(group, 1);
  const at::Tensor v = heads(shape.heads + shape.kv_heads, shape.kv_heads, values).repeat_interleave(group, 1);
  at::Tensor hidden = at::ones({positions, positions}, at::kBool).triu(1);
  if (shape.window > 0) hidden.logical_or_(at::ones_like(hidden).tril(-shape.window));
  if (starts.defined()) {
    const at::Tensor before = at::arange(positions, at::kLong).view({1, 1, positions}) < starts.unsqueeze(2);
    hidden = hidden.logical_or(before.unsqueeze(1));
  }
  if (mask.defined()) hidden = hidden.logical_or(mask.eq(0).view({batch, 1, 1, positions}));
  const double scale = shape.scale > 0 ? shape.scale : 1 / std::sqrt(static_cast<double>(shape.head_dim));
  const at::Tensor scores = soft_cap(at::matmul(q, k.transpose(2, 3)) * scale, shape.cap);
  // A row of hidden scores would become uniform, but its query sees nothing.
  at::Tensor seen = scores.masked_fill(hidden, -1e30);
  if (sinks.defined()) {
    seen = at::cat({seen, sinks.view({1, -1, 1, 1}).expand({batch, shape.heads, positions, 1})}, 3);
  }
  const at::Tensor p = at::softmax(seen, -1).narrow(3, 0, positions).masked_fill(hidden, 0);
  return at::matmul(p, v).transpose(1, 2).reshape({batch, positions, shape.heads * values});
}

// The sum of -log p(label) over counted labels, times scale.
inline at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels, double scale) {
  return scale * at::cross_entropy_loss(logits.flatten(0, -2), labels.flatten(), {}, at::Reduction::Sum, -100);
}

}  // namespace twobp::test::reference
