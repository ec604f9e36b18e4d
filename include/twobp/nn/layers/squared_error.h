// Half the squared error: the mean over a sample's numbers and (through Context::loss_weight = 1 / samples) over the
// global batch. Compares x (B, ...) with the batch's field `target` of the same shape. This is the loss of the
// benchmark model without a head.
#pragma once

#include "twobp/nn/layer.h"

namespace twobp {

class SquaredError : public Layer {
 public:
  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
};

}  // namespace twobp
