#include "twobp/train/measure_slices.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/simulate/in_process.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/transport/collectives.h"

namespace twobp {
namespace {

Cuts cuts_by_hand(const std::vector<int>& lengths, int64_t positions) {
  Cuts cuts = {0};
  for (const int length : lengths) cuts.push_back(cuts.back() + length);
  TWOBP_CHECK(cuts.back() == positions, "pipeline.slice_lengths add up to ", cuts.back(),
              " positions, but the sequences have ", positions, ": set data.sequence or the lengths.");
  return cuts;
}

}  // namespace

SliceProfiles measured_slices(const ModelSpec& model, const ProfiledBatch& batch, const PipelineConfig& config,
                              const Device& device, double seconds, const StepSeconds& step) {
  Cuts by_hand;
  if (!config.slice_lengths.empty()) by_hand = cuts_by_hand(config.slice_lengths, sequence_length(batch.fields));
  if (config.slices == 1) return {{}, {measure_profile(model, batch, seconds, device)}};
  if (!by_hand.empty()) return measure_slices(model, batch, by_hand, seconds, device);
  const Cuts equal = equal_cuts(sequence_length(batch.fields), config.slices);
  const bool by_time = config.slice_cost == kMeasuredSliceCost;
  SliceProfiles found = by_time ? measure_slices(model, batch, equal, seconds, device)
                                : count_operations_of_slices(model, batch, equal, device);
  const Cuts better = step ? fastest_cuts(model, found, step) : growing_cuts(model, found, /*growth=*/1);
  return by_time && better == equal ? found : measure_slices(model, batch, better, seconds, device);
}

double simulated_seconds(const ModelSpec& model, const SliceProfiles& slices, const PipelineOptions& options,
                         const Variant& variant, int micro_batches) {
  const std::vector<int>& placed = options.rank_of_stage;
  const std::vector<int> split =
      options.split.empty() ? measured_split(model, layer_costs(model, sum_of(slices)), placed) : options.split;
  const Schedule schedule = variant.schedule.make(options.stages, *std::max_element(placed.begin(), placed.end()) + 1,
                                                  micro_batches, variant.policy, slices.count());
  const auto costs = profiled_costs(layer_costs_of_stages(model, slices.profiles, split));
  return simulate(schedule, costs, in_process_simulation()).step_seconds;
}

SliceProfiles agreed_slices(Transport& processes, const ModelSpec& model, int slices,
                            const std::function<SliceProfiles()>& measure, double timeout) {
  SliceProfiles agreed;
  if (processes.rank() == 0) agreed = measure();
  if (processes.size() == 1) return agreed;
  if (processes.rank() != 0) {
    agreed.profiles.resize(slices);
    for (Profile& profile : agreed.profiles) {
      for (const LayerSpec& layer : model.layers) profile[layer.kind] = {};
    }
    if (slices > 1) agreed.cuts.resize(slices + 1);
  }
  at::Tensor cuts = at::empty({static_cast<int64_t>(agreed.cuts.size())}, at::kLong);
  std::copy(agreed.cuts.begin(), agreed.cuts.end(), cuts.mutable_data_ptr<int64_t>());
  if (slices > 1) broadcast(processes, cuts, 0, timeout);
  std::copy_n(cuts.const_data_ptr<int64_t>(), agreed.cuts.size(), agreed.cuts.begin());
  for (Profile& profile : agreed.profiles) {
    at::Tensor numbers = pack_profile(profile);
    broadcast(processes, numbers, 0, timeout);
    unpack_profile(numbers, profile);
  }
  return agreed;
}

}  // namespace twobp
