// Self-attention of packed projections: causal, and bidirectional.
#pragma once

#include <optional>
#include <string>

#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/rows/row_operations.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/dropout.h"
#include "twobp/nn/layers/rope.h"

namespace twobp {

struct AttentionShape {
  int64_t heads = 1;     // H
  int64_t kv_heads = 1;  // K, divides H
  int64_t head_dim = 1;  // D
  RopeSettings rope{};
  int64_t rotary = -1;       // features of a head that turn, even; -1: all of them; 0: none
  int64_t window = 0;        // keys that a query sees at most, its own included; 0: no limit
  double scale = 0;          // of the scores; 0: 1 / sqrt(D)
  double cap = 0;            // scaled scores become cap * tanh(score / cap); 0: they do not
  bool interleaved = false;  // a row is (q | k | v) of head 0, then of head 1, and so on; H = K
  int64_t value_dim = 0;     // V, of a head's values; 0: D
  bool rotary_last = false;  // the features that turn are the last of a head, not the first

  int64_t rotary_dims() const { return rotary < 0 ? head_dim : rotary; }
  PackedAttention causal(at::Tensor shift = {}, const DropoutMask& dropout = {},
                         std::shared_ptr<const DocumentPlaces> documents = {}) const {
    return {heads, kv_heads, head_dim,    /*causal=*/true, std::move(shift), dropout, window, std::move(documents),
            scale, cap,      interleaved, value_dim};
  }
  int64_t packed() const { return causal().packed(); }
};

class Attention : public Layer {
 public:
  // `dropout` is the probability, and `name` distinguishes this layer's mask from those of other layers. With the name
  // of a weight `sinks`, each head has a score of its own, which takes its share of the probabilities and has no value.
  Attention(const AttentionShape& shape, at::ScalarType dtype, double dropout = 0, std::string_view name = "attention",
            const std::string& sinks = "", double init_std = 0);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  bool takes_padded_rows() const override { return true; }
  void collect_parameters(std::vector<Parameter*>& parameters) override {
    if (sinks_) parameters.push_back(&*sinks_);
  }

 private:
  // Grows cos_ and sin_ to `positions` rows, the length of the sequence.
  void prepare_rope(int64_t positions, at::Device device);
  // Rotates q and k of `packed` in place; its first position is `past`. `back` applies the inverse rotation.
  void rotate(at::Tensor& packed, int64_t past, bool back) const;
  // Returns the output (B, S, H V) and the log-sum-exp (B, H, S) for `packed` after rotation.
  std::pair<at::Tensor, at::Tensor> attend(const at::Tensor& packed, const Context& context, const Saved& saved) const;
  // Attention's form for this micro-batch.
  PackedAttention form(const Context& context, const at::Tensor& padding, const at::Tensor& packed,
                       const Saved& saved) const;
  // The queries that see nothing but padding, (B, S, 1). `padding` has `past` positions before theirs.
  at::Tensor blind(const at::Tensor& padding, const PackedAttention& attention, int64_t past) const;
  AttentionShape shape_;
  DropoutRate rate_;
  at::ScalarType dtype_;
  std::optional<Parameter> sinks_;  // (H)
  at::Tensor cos_;                  // (positions, rotary dims / 2)
  at::Tensor sin_;
  int64_t length_ = 0;  // the length of the sequence that their frequencies are for
};

// Self-attention in both directions with a padding mask. Takes the packed projections (B, S, 3 H D) = (q | k | v) and
// returns (B, S, H D). It has no weights of its own. The batch's optional field `attention_mask` (B, S) int64 is 0 at
// padding, and no query attends to padding. Dropout acts on the probabilities (ATen's fused attention refuses it on
// CPUs). Neither probabilities nor masks are kept: backward-p1 recomputes them. It writes dL/d(q | k | v) over q, k and
// v if no other object holds them.
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
