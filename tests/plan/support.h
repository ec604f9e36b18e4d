// This file makes cost models by hand for the planner's tests.
#pragma once

#include <string>
#include <vector>

#include "tests/schedule/support.h"
#include "twobp/plan/cost_model.h"

namespace twobp {

// These are the seconds and bytes of a layer for one sample.
struct TestKind {
  double forward = 1;
  double backward_p1 = 1;
  double backward_p2 = 1;
  double held = 10;  // beside the output
  double stash = 8;
  double output = 2;  // also of the input gradient
  double fixed = 30;
};

inline LayerCost layer_of(const TestKind& kind, int samples) {
  LayerCost layer;
  layer.share.forward = kind.forward * samples;
  layer.share.backward_p1 = kind.backward_p1 * samples;
  layer.share.backward_p2 = kind.backward_p2 * samples;
  layer.share.p2_units = kind.backward_p2 > 0 ? 1 : 0;
  layer.share.forward_held = (kind.held + kind.output) * samples;
  layer.share.forward_peak = layer.share.forward_held;
  layer.share.stash = (kind.backward_p2 > 0 ? kind.stash : 0) * samples;
  // I frees dL/dy and the tensors that W does not need, and leaves dL/dx.
  layer.share.p1_held = layer.share.stash - kind.held * samples;
  layer.share.p1_peak = kind.output * samples;
  layer.share.p2_peak = 0;
  layer.output = layer.input_gradient = kind.output * samples;
  return layer;
}

// Makes a model with one layer of each kind in turn, measured for 1 and 2 samples. The costs are
// proportional.
inline CostModel model_of(const std::vector<TestKind>& layers) {
  CostModel model;
  model.micro_batch_sizes = {1, 2};
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string name = concat("kind", i);
    model.layers.push_back({concat("layer.", i), name});
    KindCosts kind;
    kind.parameter_bytes = kind.gradient_bytes = kind.optimizer_bytes = layers[i].fixed / 3;
    for (const int size : model.micro_batch_sizes) kind.at_size.push_back(layer_of(layers[i], size));
    model.kinds[name] = kind;
  }
  return model;
}

}  // namespace twobp
