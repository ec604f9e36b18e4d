// y = x W^T, or x W^T + b: x (..., in) -> y (..., out). Several projections of the same input form one Linear, whose
// weight stacks their rows. There is one GEMM forward, one for dx (separate gradients would have to be summed), and one
// for W.
//   p1: dx = dy W, db += sum of dy's rows        p2: dW += dy^T x
#pragma once

#include <optional>

#include "twobp/nn/layer.h"

namespace twobp {

class Linear : public Layer {
 public:
  // The weight is (sum of the parts' rows, in). The parts of a bias have the weight's names, with ".bias" for
  // ".weight". A `transposed` weight, of one part, is (in, rows), as in GPT-2.
  Linear(std::vector<ParameterPart> parts, int64_t in, double init_std, at::ScalarType dtype, bool bias = false,
         bool transposed = false);
  // A bias with its own names. It has as many rows as the weight, and at least one part.
  Linear(std::vector<ParameterPart> parts, int64_t in, double init_std, at::ScalarType dtype,
         std::vector<ParameterPart> bias);

  // Whether backward-p2 has work to do. Only then must an input be kept for it.
  bool has_p2() const { return weight_.trainable(); }

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  bool p2_reads_other_weights() const override { return false; }
  void collect_parameters(std::vector<Parameter*>& parameters) override;
  void pad_rows() override { padded_ = true; }

 private:
  // The weight as (out, in).
  at::Tensor weight() const { return weight_.transposed() ? weight_.value.t() : weight_.value; }

  Parameter weight_;               // (out, in), or (in, out) if transposed
  std::optional<Parameter> bias_;  // (out), float32 if the layer computes in reduced precision
  bool padded_ = false;            // whether the rows of y and of its gradient are padded
};

}  // namespace twobp
