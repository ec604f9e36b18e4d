// The description of a run in its trace, in addition to the events, so that the same step can be simulated.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

class Pipeline;
struct StepPlan;

struct TracedRun {
  Schedule schedule;                 // ready to run
  std::vector<StageCost> costs;      // by stage, of one micro-batch, as profiled before the run
  std::vector<double> cap_per_rank;  // bytes of activations and stash that a rank may hold; 0: no cap
};

// Of steps with this setup. After the first step, because the caps depend on the optimizer's state.
TracedRun traced_run(const Pipeline& pipeline, const StepPlan& plan);

// Messages are left out; add_communication adds them again.
nlohmann::ordered_json to_json(const TracedRun& run);

// Trusts nothing: throws Error for a schedule that does not validate, for numbers out of range, and for missing keys.
// The message begins with `origin`.
TracedRun parse_traced_run(const nlohmann::ordered_json& json, const std::string& origin);

}  // namespace twobp
