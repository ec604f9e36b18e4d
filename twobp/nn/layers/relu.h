// y = max(0, x), element by element, of any shape. Keeps y, which the layer behind often keeps too.
#pragma once

#include "twobp/nn/layer.h"

namespace twobp {

class Relu : public Layer {
 public:
  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
};

}  // namespace twobp
