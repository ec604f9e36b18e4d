// A proven lower bound on the step time of a pipeline. It holds for any order of its ops that keeps micro-batch order
// within F, I and W of a stage, with or without fused backwards, and with W whole or in pieces.
//
// It is the strongest combination of three relaxations:
//   - critical path: the longest chain of ops that wait for one another, messages included;
//   - busiest rank: a rank's ops, each with the earliest start (head) and the least time that must follow
//     (tail), scheduled alone with preemption (Jackson's preemptive schedule; Carlier, "The one-machine
//     sequencing problem", EJOR 11, 1982). Heads and tails count what the rank itself must run before or
//     after an op;
//   - memory: under a cap, micro-batch m cannot start on a stage before enough earlier ones have freed their
//     bytes. So their I (or W) comes before F of m, which bounds the throughput by the way there and back.
//     With slices only I counts.
#pragma once

#include <string>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct LowerBound {
  double seconds = 0;
  int rank = 0;              // the rank whose work gives it (the busiest of several); -1: the critical path
  double critical_path = 0;  // the bound by the longest chain alone
};

// Of `options`, message_seconds and cap_per_rank count. Takes milliseconds, or some seconds at 64 ranks and 256
// micro-batches. Above about 10^9 pairs of ops on the same rank, pairs are ignored; the bound is then weaker but still
// valid. Throws Error for costs that `simulate` rejects, and for a cap below least_activation_bytes (stage_bytes.h).
LowerBound lower_bound(const std::vector<int>& rank_of_stage, int micro_batches, const std::vector<StageCost>& costs,
                       const SimulationOptions& options = {}, int slices = 1);

}  // namespace twobp
