// A layer that keeps less and recomputes the rest: activation recomputation (arXiv 1604.06174). Because the backward
// pass is split, the intermediate derivatives between backward-p1 and backward-p2 can be recomputed in the same way.
// arXiv 2405.18047 leaves this open.
//
//              kept from F to I       kept from I to W       I            W
//   none       what the layer keeps   what the layer keeps   I            W
//   activations  x                    what the layer keeps   F, I         W
//   derivatives  what the layer keeps, x    x, dL/dy         I            F, I, W
//   both       x                      x, dL/dy               F, I         F, I, W
//
// All modes agree to the bit. Repeated work changes nothing a second time: buffers (running statistics) are restored,
// and gradients that backward-p1 adds (norm gains, biases) are discarded. Layers need no code for this. They only
// follow the rule of add_a_layer.md that results depend on inputs, parameters and Context alone.
#pragma once

#include <memory>
#include <vector>

#include "twobp/core/recompute_mode.h"
#include "twobp/nn/layer.h"

namespace twobp {

class RecomputeLayer : public Layer {
 public:
  RecomputeLayer(std::unique_ptr<Layer> layer, Recompute mode);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  // Called only if derivatives are recomputed. Runs F, I and all of the layer's W, one micro-batch after the other. It
  // does not concatenate, because that would hold the operands of several micro-batches at once.
  void backward_p2(std::span<Saved* const> saved) override;
  // The layer's own units, or a single unit if derivatives are recomputed.
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  // Whether there is a backward-p2 that recomputes derivatives.
  bool recomputes_in_p2();
  // Repeats forward to fill `inner` with what it keeps. The result is dropped.
  void forward_again(Values x, const Context& context, Saved& inner);

  std::unique_ptr<Layer> layer_;
  Recompute mode_;
  bool again_in_p1_;  // activations
  bool again_in_p2_;  // derivatives
  std::vector<Parameter*> parameters_;
};

}  // namespace twobp
