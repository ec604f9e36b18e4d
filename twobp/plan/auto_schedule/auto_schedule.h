// Finds a schedule for given costs, placement and byte caps: list scheduling under many rules, then local
// search. The named schedules are among the starts. Also returns a bound on how far the result is from the
// optimum.
//
// The result is never worse than the best named schedule (under any p2 policy) that fits the caps. It keeps
// the order of micro-batches and slices within F, I and W of each stage, so training with it gives the same
// bits. It does not depend on the clock: the same input, effort and seed give the same schedule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// A lower bound on the step time of a pipeline: the longest chain of ops that wait for one another, messages included,
// or a rank's ops alone, each with its earliest begin and the least time that must follow (Jackson's preemptive
// schedule; Carlier, "The one-machine sequencing problem", EJOR 11, 1982). It holds for any order that keeps
// micro-batch order within F, I and W of a stage, also with B or with W in pieces. Caps do not count.
// Of `options`, the times of messages count. Throws Error for costs that `simulate` rejects, and for a cap below
// least_activation_bytes (stage_bytes.h).
double lower_bound(const std::vector<int>& rank_of_stage, int micro_batches, const std::vector<StageCost>& costs,
                   const SimulationOptions& options = {}, int slices = 1);

enum class SearchEffort : uint8_t {
  kQuick,  // list scheduling and a short search: for the many calls of a planner
  kUsual,  // up to a few seconds at 8 ranks and 32 micro-batches
};

struct AutoScheduleOptions {
  SearchEffort effort = SearchEffort::kUsual;
  uint64_t seed = 1;
  int slices = 1;  // of each micro-batch (Schedule::slices)
  // By rank: the highest peak that a schedule may reach in the simulation, at least its cap; empty: the caps.
  // W cannot make room for everything, because messages wait on their sender's account.
  std::vector<double> most_bytes{};
};

struct AutoSchedule {
  // Ready to run, named "auto" unless a named one won. W is placed (P2Policy::kPlaced), unless W in pieces
  // that fill the waits (`fill`) is faster, or a named schedule with another policy was the best.
  Schedule schedule;
  double seconds = 0;        // simulated
  double bound = 0;          // seconds (lower_bound)
  std::string method;        // the winner: "local search", "list scheduling" or "named"
  std::string best_named;    // the best named schedule that fits, with its policy: "1f1b fill"; empty if none does
  double named_seconds = 0;  // its time; 0 if there is none
  long iterations = 0;       // moves of the local search

  // The most by which a better schedule could win, relative to the bound. The search checks that the bound
  // holds; only rounding is cut off here.
  double gap() const { return bound > 0 ? std::max(0.0, seconds / bound - 1) : 0; }
  // The speed-up over the best named schedule.
  double gain() const { return named_seconds > 0 ? named_seconds / seconds : 1; }
};

// No schedule fits the caps, or none was found.
class NoScheduleFits : public Error {
 public:
  using Error::Error;
};

// `costs` as for simulate: one row, one for each of AutoScheduleOptions::slices, or those of each
// micro-batch, which may differ in seconds alone. `options` as for simulate. cap_per_rank has the bytes in
// addition to the fixed ones, and `timeline` is ignored. Throws Error for costs that simulate rejects. Throws
// NoScheduleFits if none was found for the caps. It names a cap from which on one is found, if the caps are
// equal: what the least demanding of the named schedules, and of one micro-batch after the other, needs.
AutoSchedule auto_schedule(const std::vector<int>& rank_of_stage, int micro_batches,
                           const std::vector<StageCost>& costs, const SimulationOptions& options = {},
                           const AutoScheduleOptions& search = {});

// The placements of this many stages on this many ranks: linear, V, looped; none if the numbers do not
// divide.
std::vector<Placement> possible_placements(int stages, int ranks);

}  // namespace twobp
