// Runs a model's head only at positions whose label counts. In masked language modelling, about one label in seven
// counts. x (B, S, C) with the batch's `labels` (B, S) -> the branch's loss on (n, C) and labels (n). dL/dx is 0 at the
// other positions. How much the head computes and keeps depends on the micro-batch's labels.
#pragma once

#include <memory>

#include "twobp/nn/layer.h"

namespace twobp {

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
