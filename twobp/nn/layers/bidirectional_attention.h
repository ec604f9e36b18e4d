// Self-attention in both directions with a padding mask. Takes the packed projections (B, S, 3 H D) = (q | k | v) and
// returns (B, S, H D). It has no weights of its own. The batch's optional field `attention_mask` (B, S) int64 is 0 at
// padding, and no query attends to padding. Dropout acts on the probabilities (ATen's fused attention refuses it on
// CPUs). Neither probabilities nor masks are kept: backward-p1 recomputes them. It writes dL/d(q | k | v) over q, k and
// v if no other object holds them.
#pragma once

#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/dropout_rate.h"

namespace twobp {

struct BidirectionalAttentionShape {
  int64_t heads = 1;     // H
  int64_t head_dim = 1;  // D

  int64_t width() const { return heads * head_dim; }
};

class BidirectionalAttention : public Layer {
 public:
  // `dropout` is the dropout probability of the attention probabilities. `name` distinguishes this layer's mask from
  // those of other layers.
  BidirectionalAttention(const BidirectionalAttentionShape& shape, double dropout, std::string_view name,
                         at::ScalarType dtype);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  bool takes_padded_rows() const override { return true; }

 private:
  PackedAttention settings(const Context& context, const at::Tensor& packed) const;

  BidirectionalAttentionShape shape_;
  DropoutRate rate_;
  at::ScalarType dtype_;
};

}  // namespace twobp
