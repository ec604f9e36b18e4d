// Causal self-attention with rotary embedding and grouped queries. Takes the packed projections (B, S, (H + 2
// K) D) = (q | k | v), gives (B, S, H D); no weights of its own. q and k are rotated in place; backward-p1
// writes dL/d(q | k | v) over them where nobody else holds them.
#pragma once

#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/rope.h"

namespace twobp {

struct AttentionShape {
  int64_t heads = 1;     // H
  int64_t kv_heads = 1;  // K, divides H
  int64_t head_dim = 1;  // D, even
  RopeSettings rope{};

  PackedAttention causal() const { return {heads, kv_heads, head_dim, /*causal=*/true, {}, {}}; }
  int64_t packed() const { return causal().packed(); }
};

class Attention : public Layer {
 public:
  Attention(const AttentionShape& shape, at::ScalarType dtype);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  bool takes_padded_rows() const override { return true; }

 private:
  // Grows cos_ and sin_ to `positions` rows.
  void prepare_rope(int64_t positions, at::Device device);
  // q and k of `packed` in place; its first position is `past`. Back again: the inverse rotation.
  void rotate(at::Tensor& packed, int64_t past, bool back) const;
  // Output (B, S, H D) and log-sum-exp (B, H, S) of the rotated `packed`.
  std::pair<at::Tensor, at::Tensor> attend(const at::Tensor& packed) const;
  // Generation: puts k and v of `packed`, rotated already, into the cache (2, B, K, capacity, D), and attends
  // to all positions up to the last of `packed`.
  at::Tensor with_cache(const at::Tensor& packed, Context& context, at::Tensor& cache) const;

  AttentionShape shape_;
  at::ScalarType dtype_;
  at::Tensor cos_;  // (positions, D / 2)
  at::Tensor sin_;
};

}  // namespace twobp
