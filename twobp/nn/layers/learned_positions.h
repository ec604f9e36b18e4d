// y = x + P[position]: x (B, S, C), a learned vector for each position (GPT-2). Positions count from the first column,
// or from where a packed document begins (documents.h), and in generation from what came before. Backward-p1 adds the
// sum over the batch to the vectors' gradient, so no work remains for backward-p2.
#pragma once

#include "twobp/nn/layer.h"

namespace twobp {

class LearnedPositions : public Layer {
 public:
  LearnedPositions(std::string name, int64_t positions, int64_t dim, double init_std, at::ScalarType dtype);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  Parameter weight_;  // (positions, dim)
};

}  // namespace twobp
