// Causal self-attention with rotary embedding and grouped queries. Takes the packed projections (B, S, (H + 2
// K) D) = (q | k | v) and returns (B, S, H D). It has no weights of its own. q and k are rotated in place.
// Backward-p1 writes dL/d(q | k | v) over q, k and v if no other object holds them.
//
// No query attends to the batch's padding (padding.h). A query that sees nothing but padding gives zeros, as
// in PyTorch's scaled_dot_product_attention. Positions count from the first column, padding or not.
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

  PackedAttention causal(at::Tensor shift = {}) const {
    return {heads, kv_heads, head_dim, /*causal=*/true, std::move(shift), {}};
  }
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
  // Rotates q and k of `packed` in place; its first position is `past`. `back` applies the inverse rotation.
  void rotate(at::Tensor& packed, int64_t past, bool back) const;
  // Returns the output (B, S, H D) and the log-sum-exp (B, H, S) for `packed` after rotation.
  std::pair<at::Tensor, at::Tensor> attend(const at::Tensor& packed, const Context& context) const;
  // For generation: copies k and v of `packed`, already rotated, into the cache (2, B, K, capacity, D). Then
  // attends to all positions up to the last one of `packed`.
  at::Tensor with_cache(const at::Tensor& packed, Context& context, at::Tensor& cache) const;

  AttentionShape shape_;
  at::ScalarType dtype_;
  at::Tensor cos_;  // (positions, D / 2)
  at::Tensor sin_;
};

}  // namespace twobp
