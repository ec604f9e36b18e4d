// What no schedule can beat: a proven lower bound on the step time of a pipeline, for any order of its ops
// that keeps micro-batch order within F, I and W of a stage, with or without fused backwards, W whole or in
// pieces.
//
// Three relaxations, the strongest combination of which counts:
//   - critical path: the longest chain of ops that wait for one another, messages included;
//   - busiest rank: a rank's ops with the earliest start (head) and the least time that has to follow (tail)
//     of each, scheduled alone with preemption (Jackson's preemptive schedule; Carlier, "The one-machine
//     sequencing problem", EJOR 11, 1982). Heads and tails count what the rank itself must run before or
//     after an op;
//   - memory: under a cap, micro-batch m cannot start on a stage before so many earlier ones have given up
//     their bytes: I (or W) of those comes before F of m, which bounds the throughput by the way there and
//     back. W may run within F of a stage of several layers, so that only its I counts there.
#pragma once

#include <string>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct LowerBound {
  double seconds = 0;
  int rank = 0;               // whose work gives it (of several, the busiest); -1: the critical path
  double critical_path = 0;   // the longest chain alone
  double without_memory = 0;  // the bound if there was no cap
};

// `options`: message_seconds and cap_per_rank count. Time: milliseconds, some seconds at 64 ranks and 256
// micro-batches; more than about 10^9 pairs of ops on the same rank are not looked at, which makes the bound
// weaker and stays right. Throws Error for costs that `simulate` refuses, and for a cap below
// least_activation_bytes (stage_bytes.h).
LowerBound lower_bound(const std::vector<int>& rank_of_stage, int micro_batches,
                       const std::vector<StageCost>& costs, const SimulationOptions& options = {});

}  // namespace twobp
