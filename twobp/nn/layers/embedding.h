// Token embedding: the batch's input_ids (B, S) int64 -> (B, S, C), times a scale. This is the first layer of a model,
// so it has no input values and no backward-p1. Backward-p2 adds the rows of dL/dy in order, including those of
// repeated tokens, but not those of the padding token.
#pragma once

#include "twobp/nn/layer.h"

namespace twobp {

class Embedding : public Layer {
 public:
  // `padding`: the token without a gradient; -1: none.
  Embedding(std::string name, int64_t vocab, int64_t dim, double init_std, at::ScalarType dtype, int64_t padding = -1,
            double scale = 1);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  Parameter weight_;  // (vocab, dim)
  int64_t padding_;
  double scale_;
};

}  // namespace twobp
