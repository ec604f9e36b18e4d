#include "twobp/schedule/simulate/layer_cost.h"

namespace twobp {

LayerCost forward_only(const LayerCost& cost, double input) {
  return {.forward = cost.forward,
          .forward_peak = cost.forward_peak,
          .forward_held = cost.output - input,
          .output = cost.output};
}

}  // namespace twobp
