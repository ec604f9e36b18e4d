#include "twobp/train/measure_slices.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/pipeline/profile/profile_exchange.h"
#include "twobp/pipeline/profile/simulated_costs.h"
#include "twobp/pipeline/stage_split.h"
#include "twobp/schedule/check/in_process.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/transport/collectives.h"

namespace twobp {
namespace {

// Steps that differ less are not told apart by a profile.
constexpr double kFaster = 0.995;

Cuts cuts_by_hand(const std::vector<int>& lengths, int64_t positions) {
  Cuts cuts = {0};
  for (const int length : lengths) cuts.push_back(cuts.back() + length);
  TWOBP_CHECK(cuts.back() == positions, "pipeline.slice_lengths add up to ", cuts.back(),
              " positions, but the sequences have ", positions, ": set data.sequence or the lengths.");
  return cuts;
}

Cuts fastest_cuts(const ModelSpec& model, const SliceProfiles& measured, const StepSeconds& step) {
  Cuts best = growing_cuts(model, measured, 1);
  if (!step) return best;
  double least = kFaster * step(expected_slices(measured, best));
  for (const double growth : {0.84, 0.88, 0.92, 0.94, 0.96, 0.98, 1.02, 1.04, 1.06, 1.08, 1.12, 1.16}) {
    const Cuts cuts = growing_cuts(model, measured, growth);
    const double seconds = step(expected_slices(measured, cuts));
    if (seconds >= least) continue;
    least = seconds;
    best = cuts;
  }
  return best;
}

}  // namespace

SliceProfiles measured_slices(const ModelSpec& model, const Fields& fields, const PipelineConfig& config,
                              const Device& device, double seconds, const StepSeconds& step) {
  if (config.slices == 1) return {{}, {measure_profile(model, fields, seconds, device)}};
  const int64_t positions = sequence_length(fields);
  if (!config.slice_lengths.empty()) {
    return measure_slices(model, fields, cuts_by_hand(config.slice_lengths, positions), seconds, device);
  }
  SliceProfiles measured =
      measure_slices(model, fields, equal_cuts(positions, config.slices), seconds, device);
  const Cuts better = fastest_cuts(model, measured, step);
  return better == measured.cuts ? measured : measure_slices(model, fields, better, seconds, device);
}

double simulated_step(const ModelSpec& model, const SliceProfiles& slices, const PipelineOptions& options,
                      const Variant& variant, int micro_batches) {
  const std::vector<int>& placed = options.rank_of_stage;
  const std::vector<int> split = options.split.empty()
                                     ? measured_split(model, layer_profiles(model, sum_of(slices)), placed)
                                     : options.split;
  const Schedule schedule =
      variant.schedule.make(options.stages, *std::max_element(placed.begin(), placed.end()) + 1,
                            micro_batches, variant.policy, slices.count());
  const auto costs = profiled_costs(stage_profiles(model, slices.profiles, split));
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
