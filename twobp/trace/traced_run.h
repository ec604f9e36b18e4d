// What ran, beside what it did: what a trace says of its run, so that the same step can be simulated.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

struct TracedRun {
  Schedule schedule;                 // ready to run
  std::vector<StageCost> costs;      // by stage, of one micro-batch, as profiled before the run
  std::vector<double> cap_per_rank;  // bytes of activations and stash a rank may hold; 0: any number
};

// Messages are left out: add_communication puts them back.
nlohmann::ordered_json to_json(const TracedRun& run);

// Trusts nothing: a schedule that does not validate, numbers out of range and keys left out are Errors. The
// message begins with `origin`.
TracedRun parse_traced_run(const nlohmann::ordered_json& json, const std::string& origin);

}  // namespace twobp
