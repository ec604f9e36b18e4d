// A layer that keeps less and computes it again: activation recomputation (arXiv 1604.06174) and, since the
// backward is split, the same for the intermediate derivatives between backward-p1 and backward-p2, which
// arXiv 2405.18047 leaves open.
//
//              kept from F to I       kept from I to W       I            W
//   none       what the layer keeps   what the layer keeps   I            W
//   activations  x                    what the layer keeps   F, I         W
//   derivatives  what the layer keeps, x    x, dL/dy         I            F, I, W
//   both       x                      x, dL/dy               F, I         F, I, W
//
// All is the same to the bit. What runs again changes nothing a second time: buffers (running statistics) are
// put back, and gradients that backward-p1 adds (norm gains, biases) are discarded. Layers need not know; all
// they owe is what add_a_layer.md asks of every layer: results that depend on inputs, parameters and Context
// alone.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/nn/layer.h"

namespace twobp {

enum class Recompute : uint8_t { kNone, kActivations, kDerivatives, kBoth };
std::vector<std::string> recompute_names();
std::string_view recompute_name(Recompute mode);
// Throws Error: a name that is none of them.
Recompute parse_recompute(std::string_view name);

class RecomputeLayer : public Layer {
 public:
  RecomputeLayer(std::unique_ptr<Layer> layer, Recompute mode);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  // Only if derivatives are computed again: F, I and all of the layer's W, one micro-batch after the other:
  // it does not concatenate, which would hold the operands of several at once.
  void backward_p2(std::span<Saved* const> saved) override;
  // The layer's own units, or one in all if derivatives are computed again.
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  // Whether there is a backward-p2 that computes derivatives again.
  bool recomputes_in_p2();
  // Fills `inner` with what forward keeps; its result is dropped.
  void forward_again(Values x, const Context& context, Saved& inner);

  std::unique_ptr<Layer> layer_;
  Recompute mode_;
  bool again_in_p1_;  // activations
  bool again_in_p2_;  // derivatives
  std::vector<Parameter*> parameters_;
};

}  // namespace twobp
