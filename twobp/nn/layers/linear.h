// y = x W^T, or x W^T + b: x (..., in) -> y (..., out). Several projections of the same input are one Linear
// whose weight has their rows below each other: one GEMM forward, one for dx (which would otherwise be
// summed), one for W.
//   p1: dx = dy W, db += sum of dy's rows        p2: dW += dy^T x
#pragma once

#include <optional>

#include "twobp/nn/layer.h"

namespace twobp {

class Linear : public Layer {
 public:
  // The weight is (sum of the parts' rows, in).
  // With a bias, its parts are called as the weight's, ".bias" for ".weight".
  Linear(std::vector<ParameterPart> parts, int64_t in, double init_std, at::ScalarType dtype,
         bool bias = false);
  // A bias with names of its own: as many rows as the weight, and one part at least.
  Linear(std::vector<ParameterPart> parts, int64_t in, double init_std, at::ScalarType dtype,
         std::vector<ParameterPart> bias);

  // Whether there is something for backward-p2 to do, and so an input to keep for it.
  bool has_p2() const { return weight_.trainable(); }

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;
  void pad_rows() override { padded_ = true; }

 private:
  Parameter weight_;               // (out, in)
  std::optional<Parameter> bias_;  // (out), float32 where the layer computes in reduced precision
  bool padded_ = false;            // y's rows, and its gradient's
};

}  // namespace twobp
