// Makes random costs of stages. The bytes of their layers and messages add up.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "tests/schedule/support.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

inline double random_real(Random& random, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random);
}

// Gives every stage messages and one to three layers. The bytes add up: W frees everything that F and I leave.
inline void give_layers(Random& random, std::vector<StageCost>& costs) {
  for (StageCost& cost : costs) {
    cost.output_bytes = random_real(random, 0, 2);
    cost.input_gradient_bytes = random_real(random, 0, 2);
  }
  for (size_t stage = 0; stage < costs.size(); ++stage) {
    const bool last = stage + 1 == costs.size();
    const int layers = random_int(random, 1, 3);
    const int trained = random_int(random, 0, layers - 1);  // this layer certainly has a W
    double input = stage > 0 ? costs[stage - 1].output_bytes : 0;
    double input_gradient = stage > 0 ? costs[stage].input_gradient_bytes : 0;
    for (int l = 0; l < layers; ++l) {
      const bool end = l + 1 == layers;
      const double output = end ? costs[stage].output_bytes : random_real(random, 0, 2);
      const double output_gradient = !end   ? random_real(random, 0, 2)
                                     : last ? 0
                                            : costs[stage + 1].input_gradient_bytes;
      const double kept = random_real(random, 0.1, 1);
      LayerCost& layer = costs[stage].layers.emplace_back();
      layer.forward = random_real(random, 0.1, 1);
      layer.backward_p1 = random_real(random, 0.1, 1);
      layer.backward_p2 = random_real(random, 0.1, 1);
      layer.p2_units = l == trained ? random_int(random, 1, 2) : random_int(random, 0, 2);
      layer.stash = layer.p2_units > 0 ? random_real(random, 0, 1) : 0;
      layer.forward_held = kept + output - input;
      layer.forward_peak = std::max(0.0, layer.forward_held) + random_real(random, 0, 0.3);
      layer.p1_held = layer.stash + input_gradient - kept - output_gradient;
      layer.p1_peak = std::max(0.0, layer.p1_held) + random_real(random, 0, 0.3);
      layer.p2_peak = random_real(random, 0, 0.2);
      input = output;
      input_gradient = output_gradient;
    }
  }
}

// The costs of each of `slices` slices and stage, slice by slice, from those of a micro-batch. Every slice has its own
// part of seconds and bytes. With layers, the last slice's I makes gradients for all earlier slices, whose own I frees
// them.
inline std::vector<StageCost> in_slices(Random& random, const std::vector<StageCost>& whole, int slices) {
  std::vector<StageCost> costs;
  const size_t stages = whole.size();
  for (int slice = 0; slice < slices; ++slice) {
    const double part = random_real(random, 0.2, 2) / slices;
    for (StageCost cost : whole) {
      for (double StageCost::*of :
           {&StageCost::forward, &StageCost::backward_p1, &StageCost::backward_p2, &StageCost::activation_bytes,
            &StageCost::stash_bytes, &StageCost::output_bytes, &StageCost::input_gradient_bytes}) {
        cost.*of *= part;
      }
      for (LayerCost& layer : cost.layers) {
        for (double LayerCost::*of : {&LayerCost::forward_peak, &LayerCost::forward_held, &LayerCost::p1_peak,
                                      &LayerCost::p1_held, &LayerCost::stash, &LayerCost::p2_peak}) {
          layer.*of *= part;
        }
      }
      costs.push_back(std::move(cost));
    }
  }
  for (size_t stage = 0; stage < stages && slices > 1; ++stage) {
    if (whole[stage].layers.empty()) continue;
    LayerCost& makes = costs[costs.size() - stages + stage].layers.front();
    for (int slice = 0; slice + 1 < slices; ++slice) {
      const double gradient = random_real(random, 0, 0.5) / slices;
      makes.p1_held += gradient;
      costs[slice * stages + stage].layers.front().p1_held -= gradient;
    }
    makes.p1_peak = std::max(makes.p1_peak, makes.p1_held);
  }
  return costs;
}

// Makes any seconds and bytes. If `layered`, the costs have layers as in give_layers.
inline std::vector<StageCost> random_costs(Random& random, int stages, bool layered) {
  std::vector<StageCost> costs(stages);
  for (StageCost& cost : costs) {
    cost.forward = random_real(random, 0, 3);
    cost.backward_p1 = random_real(random, 0, 3);
    cost.backward_p2 = random_real(random, 0, 3);
    cost.p2_units = random_int(random, 1, 4);
    cost.optimizer = random_int(random, 0, 2);
    cost.activation_bytes = random_real(random, 0.5, 3);
    cost.stash_bytes = random_real(random, 0, 3);
    cost.fixed_bytes = random_real(random, 0, 20);
  }
  if (layered) give_layers(random, costs);
  return costs;
}

}  // namespace twobp
