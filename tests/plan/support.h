// This file makes cost models by hand for the planner's tests.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "tests/schedule/support.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/planner.h"

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
  layer.forward = kind.forward * samples;
  layer.backward_p1 = kind.backward_p1 * samples;
  layer.backward_p2 = kind.backward_p2 * samples;
  layer.p2_units = kind.backward_p2 > 0 ? 1 : 0;
  layer.forward_held = (kind.held + kind.output) * samples;
  layer.forward_peak = layer.forward_held;
  layer.stash = (kind.backward_p2 > 0 ? kind.stash : 0) * samples;
  // I frees dL/dy and the tensors that W does not need, and leaves dL/dx.
  layer.p1_held = layer.stash - kind.held * samples;
  layer.p1_peak = kind.output * samples;
  layer.p2_peak = 0;
  layer.output = layer.input_gradient = kind.output * samples;
  return layer;
}

// Makes a model with one layer of each kind in turn, measured for 1 and 2 samples. The costs are proportional.
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

inline CostModel random_model(Random& random, int layers) {
  std::vector<TestKind> kinds;
  for (int i = 0; i < layers; ++i) {
    TestKind kind;
    kind.forward = random_int(random, 1, 9);
    kind.backward_p1 = random_int(random, 1, 9);
    kind.backward_p2 = random_int(random, 0, 9);
    kind.held = random_int(random, 5, 20);
    kind.stash = random_int(random, 0, 5);
    kinds.push_back(kind);
  }
  CostModel model = model_of(kinds);
  model.link_latency = 0.01;
  return model;
}

// Gives each slice a part of its layer's costs. I of the last one makes gradients for the others.
inline void cut_into_slices(Random& random, CostModel& model, const std::vector<int>& counts) {
  for (const int count : counts) {
    std::vector<int> lengths(count, 8);
    lengths[0] = 128 - 8 * (count - 1);
    model.slice_lengths.push_back(lengths);
    for (auto& [name, kind] : model.kinds) {
      auto& slices = kind.in_slices.emplace_back(count);
      for (int slice = 0; slice < count; ++slice) {
        const double share = random_int(random, 1, 3) / (2.0 * count);
        for (size_t i = 0; i < model.micro_batch_sizes.size(); ++i) {
          LayerCost& cost = slices[slice].emplace_back(kind.at_size[i]);
          for (const auto number : kLayerNumbers) cost.*number *= share;
          cost.p1_held += model.micro_batch_sizes[i] * (slice + 1 == count ? count - 1.0 : -1.0);
          cost.p1_peak = std::max({0.0, cost.p1_peak, cost.p1_held});
        }
      }
    }
  }
  check_cost_model(model);
}

inline Simulation simulate_choice(const CostModel& model, const PlanChoice& choice, const PlanRequest& request = {}) {
  const PlannedRun run = planned_run(model, choice, request);
  return simulate(run.schedule, run.costs, run.options);
}

}  // namespace twobp
