#include "twobp/schedule/simulate/layer_cost.h"

#include <cstddef>

namespace twobp {

void leave_out_backward(std::vector<LayerCost>& costs, int count) {
  double input = 0;  // bytes; the batch belongs to no layer
  for (size_t i = 0; i < costs.size() && static_cast<int>(i) < count; ++i) {
    const LayerCost cost = costs[i];
    costs[i] = {.forward = cost.forward,
                .forward_peak = cost.forward_peak,
                .forward_held = cost.output - input,
                .output = cost.output,
                .forward_rise = cost.forward_rise};
    input = cost.output;
  }
}

}  // namespace twobp
