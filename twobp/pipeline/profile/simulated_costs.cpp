#include "twobp/pipeline/profile/simulated_costs.h"

#include <algorithm>
#include <utility>

namespace twobp {

namespace {

// Such bytes are never below 0, except through a measurement that other work disturbed.
double bytes_of(int64_t measured) {
  return static_cast<double>(std::max<int64_t>(0, measured));
}

}  // namespace

LayerShare layer_share(const LayerProfile& layer) {
  LayerShare share;
  share.forward = layer.forward;
  share.backward_p1 = layer.backward_p1;
  share.p2_units = layer.p2_units;
  share.forward_peak = bytes_of(layer.forward_peak);
  share.forward_held = static_cast<double>(layer.forward_held);
  share.p1_peak = bytes_of(layer.p1_peak);
  share.p1_held = static_cast<double>(layer.p1_held);
  // Without W there is nothing to free, and the measured time is only that of finding this out.
  const bool has_p2 = layer.p2_units > 0;
  share.backward_p2 = has_p2 ? layer.backward_p2 : 0;
  share.stash = has_p2 ? bytes_of(layer.stash) : 0;
  share.p2_peak = has_p2 ? bytes_of(layer.p2_peak) : 0;
  return share;
}

StageCost stage_cost(const std::vector<LayerProfile>& layers) {
  std::vector<LayerShare> shares;
  for (const LayerProfile& layer : layers) shares.push_back(layer_share(layer));
  StageCost cost = stage_of(std::move(shares));
  if (!layers.empty()) {
    cost.output_bytes = static_cast<double>(layers.back().output);
    cost.input_gradient_bytes = static_cast<double>(layers.front().input_gradient);
  }
  return cost;
}

std::vector<StageCost> profiled_costs(const std::vector<std::vector<LayerProfile>>& stages) {
  std::vector<StageCost> costs;
  for (const auto& layers : stages) costs.push_back(stage_cost(layers));
  return costs;
}

std::vector<StageCost> measured_costs(const std::vector<std::vector<LayerProfile>>& stages,
                                      const std::vector<int>& rank_of_stage, const StepReport& report) {
  const std::vector<StageCost> profiled = profiled_costs(stages);
  std::vector<StageCost> costs = profiled;
  std::vector<bool> counted(report.ranks.size(), false);
  const size_t stage_count = rank_of_stage.size();
  const double slices = static_cast<double>(costs.size() / stage_count);
  for (size_t s = 0; s < costs.size(); ++s) {
    const StageTimes& times = report.stages.at(s % stage_count);
    const double n = std::max(1, times.micro_batches);
    // A slice's part of the time is that of the profile.
    const auto part = [&](double seconds, double StageCost::*of) {
      double all = 0;
      for (size_t i = s % stage_count; i < costs.size(); i += stage_count) all += profiled[i].*of;
      return all > 0 ? seconds / n * slices * profiled[s].*of / all : seconds / n;
    };
    costs[s].forward = part(times.forward, &StageCost::forward);
    costs[s].backward_p1 = part(times.backward_p1, &StageCost::backward_p1);
    const auto& shares = costs[s].layers;
    const bool has_p2 =
        std::any_of(shares.begin(), shares.end(), [](const LayerShare& share) { return share.p2_units > 0; });
    costs[s].backward_p2 = has_p2 ? part(times.backward_p2, &StageCost::backward_p2) : 0;
    // A rank's optimizer runs once for all its stages.
    const int rank = rank_of_stage[s % stage_count];
    if (!counted.at(rank)) costs[s].optimizer = report.ranks.at(rank).optimizer;
    counted[rank] = true;
  }
  return costs;
}

}  // namespace twobp
