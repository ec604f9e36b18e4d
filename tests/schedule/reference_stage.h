// This is a stage in the form that the reference simulation (reference.h) steps through.
#pragma once

#include <algorithm>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// These are the seconds and bytes of one layer's F, I and pieces of W.
struct ReferenceLayer {
  double f, f_peak, f_held, i, i_peak, i_held, piece, stash, p2_peak;
  int pieces;
};

struct ReferenceStage {
  std::vector<ReferenceLayer> layers;
  double output = 0, gradient = 0, input = 0, output_gradient = 0, sum_bytes = 0;
  bool plain = false, last = false;
};

inline ReferenceStage reference_stage(const Schedule& schedule, const std::vector<StageCost>& costs, int s) {
  const StageCost& cost = costs[s];
  ReferenceStage stage;
  stage.last = schedule.is_last(s);
  stage.plain = cost.layers.empty();
  stage.output = cost.output_bytes;
  stage.gradient = schedule.is_first(s) ? 0 : cost.input_gradient_bytes;
  stage.input = schedule.is_first(s) ? 0 : costs[s - 1].output_bytes;
  stage.output_gradient = stage.last ? 0 : costs[s + 1].input_gradient_bytes;
  stage.sum_bytes = cost.gradient_bytes;
  if (stage.plain) {
    if (stage.last) stage.output = 0;
    const double held = cost.activation_bytes - stage.input;
    stage.layers.push_back({cost.forward, held, held + stage.output, cost.backward_p1, 0,
                            cost.stash_bytes - cost.activation_bytes - stage.output_gradient + stage.gradient,
                            cost.backward_p2 / cost.p2_units, cost.stash_bytes / cost.p2_units, 0, cost.p2_units});
  }
  for (const LayerCost& layer : cost.layers) {  // their weights are their seconds
    const int n = std::max(1, layer.p2_units);
    stage.layers.push_back({layer.forward, layer.forward_peak, layer.forward_held, layer.backward_p1, layer.p1_peak,
                            layer.p1_held, layer.backward_p2 / n, layer.stash / n, layer.p2_peak, layer.p2_units});
  }
  return stage;
}

}  // namespace twobp
