// Self-attention in both directions with a padding mask. Takes the packed projections (B, S, 3 H D) =
// (q | k | v), gives (B, S, H D); no weights of its own. The batch's field `attention_mask` (B, S) int64, if
// there is one, is 0 where a position is padding, which nobody attends to. Dropout acts on the probabilities
// (ATen's fused attention refuses it on CPUs). Neither they nor masks are kept: backward-p1 makes them again,
// and writes dL/d(q | k | v) over q, k, v where nobody else holds them.
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
  // `dropout` of the probabilities; `name` tells its mask from other layers'.
  BidirectionalAttention(const BidirectionalAttentionShape& shape, double dropout, std::string_view name,
                         at::ScalarType dtype);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  bool takes_padded_rows() const override { return true; }

 private:
  // What is added to the scores of a sample's keys, (B, S) of `options`; undefined if nothing is padding.
  at::Tensor padding(const Context& context, int64_t batch, int64_t positions,
                     const at::TensorOptions& options) const;
  PackedAttention settings(const Context& context, const at::Tensor& packed) const;

  BidirectionalAttentionShape shape_;
  DropoutRate rate_;
  at::ScalarType dtype_;
};

}  // namespace twobp
