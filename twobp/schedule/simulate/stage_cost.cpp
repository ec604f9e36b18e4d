#include "twobp/schedule/simulate/stage_cost.h"

#include <algorithm>
#include <utility>

namespace twobp {

StageCost stage_of(std::vector<LayerCost> layers) {
  StageCost stage;
  stage.forward = stage.backward_p1 = stage.backward_p2 = 0;
  stage.activation_bytes = stage.stash_bytes = 0;
  stage.p2_units = 0;
  for (const LayerCost& layer : layers) {
    stage.forward += layer.forward;
    stage.backward_p1 += layer.backward_p1;
    stage.backward_p2 += layer.backward_p2;
    stage.p2_units += layer.p2_units;
    stage.activation_bytes += layer.forward_held;
    stage.stash_bytes += layer.stash;
  }
  stage.p2_units = std::max(1, stage.p2_units);
  stage.activation_bytes = std::max(0.0, stage.activation_bytes);
  if (!layers.empty()) {
    stage.output_bytes = layers.back().output;
    stage.input_gradient_bytes = layers.front().input_gradient;
  }
  stage.layers = std::move(layers);
  return stage;
}

}  // namespace twobp
