// This file gives the bytes of a step: those of a block counted by hand (see memory_test.cpp), those of the profile,
// and those of the meter.
#pragma once

#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "tests/pipeline/support.h"
#include "twobp/models/recompute/recompute_layer.h"
#include "twobp/models/recompute/recompute_rules.h"

namespace twobp::test {

inline constexpr int64_t kMessage = kRows * kDim * kFloat;                                // x, dx
inline constexpr int64_t kSaved = (kRows * kDim + kRows + 3 * kRows * kHidden) * kFloat;  // after F, without x
inline constexpr int64_t kStash = (2 * kRows * kDim + 3 * kRows * kHidden) * kFloat;      // after I

// This is a model cut into stages.
struct SplitModel {
  std::string name;
  ModelSpec model;
  std::vector<int> split;
  std::vector<int> rank_of_stage = {};  // empty: one per rank
};

// Sets the mode of all layers, including the first and the last.
inline ModelSpec with_mode(ModelSpec model, Recompute mode) {
  recompute(model, std::vector<Recompute>(model.layers.size(), mode));
  return model;
}

inline Profile measured(const ModelSpec& model) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::set_num_threads(1);  // as in the ranks; attention's scratch memory grows with the threads
  return measure_profile(model, random_fields(1), 0.01);
}

inline Pipeline measured_pipeline(const SplitModel& of) {
  return Pipeline(of.model, measured(of.model), options_of(of.split, of.rank_of_stage));
}

// Returns, by rank, the bytes of parameters, gradients and tensors that layers keep between steps (rotary tables).
inline std::vector<int64_t> fixed_bytes(Pipeline& pipeline) {
  std::vector<int64_t> fixed;
  for (int r = 0; r < pipeline.ranks(); ++r) fixed.push_back(pipeline.meter().rank_use(r).total());
  return fixed;
}

// Returns the highest bytes of activations and stash of each rank in one step. A previous step has made the tensors
// that are kept.
inline std::vector<int64_t> measured_peaks(Pipeline& pipeline, const StepPlan& plan, StepReport* report = nullptr) {
  const auto batch = random_batch(plan.schedule.micro_batches);
  pipeline.run(plan, batch, step_request());
  take_gradients(pipeline);
  const auto fixed = fixed_bytes(pipeline);
  pipeline.meter().reset_peaks();
  StepRequest options = step_request();
  options.want_events = report != nullptr;
  const StepReport step = pipeline.run(plan, batch, options);
  take_gradients(pipeline);
  std::vector<int64_t> peaks;
  for (int r = 0; r < pipeline.ranks(); ++r) peaks.push_back(step.rank_memory[r].peak - fixed[r]);
  if (report != nullptr) *report = step;
  return peaks;
}

}  // namespace twobp::test
