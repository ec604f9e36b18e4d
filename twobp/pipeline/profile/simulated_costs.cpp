#include "twobp/pipeline/profile/simulated_costs.h"

#include <algorithm>

namespace twobp {

std::vector<StageCost> profiled_costs(const std::vector<std::vector<LayerCost>>& stages,
                                      const std::vector<double>& batch) {
  std::vector<StageCost> costs;
  for (const auto& layers : stages) costs.push_back(stage_of(layers));
  return costs_of_micro_batches(costs, batch);
}

std::vector<StageCost> measured_costs(const std::vector<std::vector<LayerCost>>& stages,
                                      const std::vector<int>& rank_of_stage, const StepReport& report,
                                      const std::vector<double>& batch) {
  const std::vector<StageCost> profiled = profiled_costs(stages, batch);
  std::vector<StageCost> costs = profiled;
  std::vector<bool> counted(report.ranks.size(), false);
  const size_t stage_count = rank_of_stage.size();
  const double rows = static_cast<double>(costs.size() / stage_count);
  for (size_t s = 0; s < costs.size(); ++s) {
    const StageTimes& times = report.stages.at(s % stage_count);
    const double n = std::max(1, times.micro_batches);
    // A row's part of the time is that of the profile.
    const auto part = [&](double seconds, double StageCost::*of) {
      double all = 0;
      for (size_t i = s % stage_count; i < costs.size(); i += stage_count) all += profiled[i].*of;
      return all > 0 ? seconds / n * rows * profiled[s].*of / all : seconds / n;
    };
    costs[s].forward = part(times.forward, &StageCost::forward);
    costs[s].backward_p1 = part(times.backward_p1, &StageCost::backward_p1);
    const auto& layers = costs[s].layers;
    const bool has_p2 =
        std::any_of(layers.begin(), layers.end(), [](const LayerCost& layer) { return layer.p2_units > 0; });
    costs[s].backward_p2 = has_p2 ? part(times.backward_p2, &StageCost::backward_p2) : 0;
    // A rank's optimizer runs once for all its stages.
    const int rank = rank_of_stage[s % stage_count];
    if (!counted.at(rank)) costs[s].optimizer = report.ranks.at(rank).optimizer;
    counted[rank] = true;
  }
  return costs;
}

}  // namespace twobp
