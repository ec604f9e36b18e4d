// Internal to this folder: the combinations that a planner considers.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "twobp/plan/planner.h"

namespace twobp {

// The cost model by recomputation.
using ModelsByRecompute = std::vector<std::pair<std::string, CostModel>>;

struct Candidate {
  PlanChoice choice;        // everything but the results of a simulation
  double most_samples = 0;  // per second: no split and no order of the ops can be faster
};

// The named schedules that a planner considers by default: each once (1f1b-1 and 1f1b-2 are 1f1b).
std::vector<std::string> planned_schedules();
// Off, and the schedule's policies for W.
std::vector<P2Policy> planned_policies(const ScheduleSource& schedule);

// All combinations that have enough layers, in a fixed order. Throws Error if there is none, with the reasons.
std::vector<Candidate> candidates(const ModelsByRecompute& models, const PlanRequest& request);

}  // namespace twobp
