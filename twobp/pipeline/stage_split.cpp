#include "twobp/pipeline/stage_split.h"

#include <algorithm>

#include "twobp/nn/layer.h"
#include "twobp/plan/partition/partition.h"

namespace twobp {
namespace {

constexpr double kSlack = 0.02;

// Value, gradient and AdamW's two moments. The optimizer is not known here, and AdamW keeps the most.
double weight_bytes(const LayerSpec& spec) {
  const auto layer = spec.make();  // allocates nothing
  double bytes = 0;
  for (const Parameter* parameter : parameters_of(*layer)) {
    const int copies = parameter->trainable() ? 4 : 1;
    bytes += static_cast<double>(copies * parameter->numel() * static_cast<int64_t>(sizeof(float)));
  }
  return bytes;
}

}  // namespace

std::vector<int> measured_split(const ModelSpec& model, const std::vector<LayerCost>& costs,
                                const std::vector<int>& rank_of_stage) {
  std::vector<double> seconds;
  for (const LayerCost& cost : costs) seconds.push_back(cost.seconds());
  const int stages = static_cast<int>(rank_of_stage.size());
  if (*std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1 < stages)
    return balanced_split(seconds, rank_of_stage);
  PartitionBytes bytes;
  for (size_t l = 0; l < costs.size(); ++l) {
    bytes.fixed.push_back(weight_bytes(model.layers[l]));
    bytes.held.push_back(std::max(0.0, costs[l].forward_held));
  }
  for (int s = 0; s < stages; ++s) bytes.in_flight.push_back(stages - s);
  return balanced_light_split(seconds, bytes, kSlack);
}

std::vector<std::vector<LayerCost>> layer_costs_of_stages(const ModelSpec& model, const std::vector<Profile>& slices,
                                                          const std::vector<int>& split) {
  std::vector<std::vector<LayerCost>> stages;
  for (const Profile& slice : slices) {
    const std::vector<LayerCost> layers = layer_costs(model, slice);
    for (auto first = layers.begin(); const int count : split) {
      stages.emplace_back(first, first + count);
      first += count;
    }
  }
  return stages;
}

}  // namespace twobp
