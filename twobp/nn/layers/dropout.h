// y = mask * x / (1 - p) as a layer of its own (dropout_rate.h). Both passes write over what they are given, if no
// other object holds it.
#pragma once

#include "twobp/nn/layer.h"
#include "twobp/nn/layers/dropout_rate.h"

namespace twobp {

class Dropout : public Layer {
 public:
  Dropout(double probability, std::string_view name) : rate_(probability, name) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;

 private:
  DropoutRate rate_;
};

}  // namespace twobp
