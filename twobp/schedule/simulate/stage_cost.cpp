#include "twobp/schedule/simulate/stage_cost.h"

#include <algorithm>
#include <utility>

namespace twobp {
namespace {

// How many times as long an op takes if the samples cost so many times the mean.
double factor(const StageCost& stage, double times_the_mean, double LayerCost::*seconds, double LayerCost::*rise) {
  double all = 0;
  double more = 0;
  for (const LayerCost& layer : stage.layers) {
    all += layer.*seconds;
    more += layer.*rise;
  }
  return all > 0 ? std::max(0.0, 1 + (times_the_mean - 1) * more / all) : 1;
}

}  // namespace

double StageCost::fixed(bool streams) const {
  if (!streams) return fixed_bytes;
  double freed = gradient_bytes;
  for (const LayerCost& layer : layers) freed -= layer.tied_gradient;
  return fixed_bytes - std::clamp(freed, 0.0, fixed_bytes);
}

StreamedBytes streamed_bytes(const std::vector<LayerCost>& layers) {
  StreamedBytes bytes;
  for (const LayerCost& layer : layers) {
    bytes.freed += layer.streamable();
    bytes.in_p1 += layer.p1_gradient;
    bytes.most = std::max(bytes.most, layer.streamed_in_w());
  }
  bytes.most += bytes.in_p1;
  return bytes;
}

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

std::vector<StageCost> costs_of_micro_batches(const std::vector<StageCost>& costs,
                                              const std::vector<double>& times_the_mean) {
  if (times_the_mean.empty()) return costs;
  std::vector<StageCost> all;
  all.reserve(costs.size() * times_the_mean.size());
  for (const double times : times_the_mean) {
    for (const StageCost& cost : costs) {
      StageCost& one = all.emplace_back(cost);
      one.forward *= factor(cost, times, &LayerCost::forward, &LayerCost::forward_rise);
      one.backward_p1 *= factor(cost, times, &LayerCost::backward_p1, &LayerCost::backward_p1_rise);
      one.backward_p2 *= factor(cost, times, &LayerCost::backward_p2, &LayerCost::backward_p2_rise);
    }
  }
  return all;
}

void leave_out_backward(std::vector<LayerCost>& costs, int count) {
  double input = 0;  // bytes; the batch belongs to no layer
  for (size_t i = 0; i < costs.size() && static_cast<int>(i) < count; ++i) {
    const LayerCost cost = costs[i];
    costs[i] = {.forward = cost.forward,
                .forward_peak = cost.forward_peak,
                .forward_held = cost.output - input,
                .output = cost.output,
                .forward_rise = cost.forward_rise,
                .forward_to_experts = cost.forward_to_experts,
                .forward_from_experts = cost.forward_from_experts,
                .beside_experts = cost.beside_experts};
    input = cost.output;
  }
}

}  // namespace twobp
