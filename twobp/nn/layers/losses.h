// Next-token loss: logits (B, S, V) against the batch's `labels` (B, S) int64. A label of -100 is not counted. The
// value is this micro-batch's share of the mean over all counted targets of the global batch (Context::loss_weight), a
// float64 scalar. The forward pass writes the logits' gradient over the logits, so they are read once. The logits may
// be scaled and capped first.
#pragma once

#include <memory>

#include "twobp/nn/layer.h"

namespace twobp {

inline constexpr int64_t kIgnoreLabel = -100;

struct LogitsForm {
  double scale = 1;  // of the logits
  double cap = 0;    // scaled logits become cap * tanh(logit / cap); 0: they do not
};

class CrossEntropy : public Layer {
 public:
  explicit CrossEntropy(const LogitsForm& form = {}) : form_(form) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  // Takes no dL/dy, because the backward pass starts at the loss.
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  bool takes_padded_rows() const override { return true; }

 private:
  LogitsForm form_;
};

// Runs a model's head only at positions whose label counts. In masked language modelling, about one label in seven
// counts. x (B, S, C) with the batch's `labels` (B, S) -> the branch's loss on (n, C) and labels (n). dL/dx is 0 at the
// other positions. How much the head computes and keeps depends on the micro-batch's labels.
class CountedPositions : public Layer {
 public:
  explicit CountedPositions(std::unique_ptr<Layer> branch) : branch_(std::move(branch)) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  std::unique_ptr<Layer> branch_;
};

}  // namespace twobp
