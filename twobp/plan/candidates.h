// Internal to this folder: the combinations that a planner looks at.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "twobp/plan/planner.h"

namespace twobp {

struct Candidate {
  PlanChoice choice;        // all but what a simulation gives
  double most_samples = 0;  // per second: no split and no order of the ops can be faster
};

// The named schedules that a planner takes when none are named: each once (1f1b-1 and 1f1b-2 are 1f1b).
std::vector<std::string> planned_schedules();
// off, and the ways to run W that the schedule has.
std::vector<P2Policy> planned_policies(std::string_view schedule);

// All combinations that have enough layers, in a fixed order. `models`: the cost model by recomputation.
// Throws Error when there is none, with the reasons.
std::vector<Candidate> candidates(const std::vector<std::pair<std::string, CostModel>>& models,
                                  const PlanRequest& request);

}  // namespace twobp
