// Finds a schedule for given costs, placement and byte caps: list scheduling under many rules, then local
// search, with the named schedules among the starts; and says how far from the best possible it can be at
// most.
//
// The result is never worse than the best named schedule (under any p2 policy) that fits the caps. It keeps
// micro-batch order within F, I and W of each stage, so training with it is equal to the bit. It does not
// depend on the clock: the same input, effort and seed give the same schedule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/plan/auto_schedule/lower_bound.h"
#include "twobp/schedule/placement.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

enum class SearchEffort : uint8_t {
  kQuick,     // list scheduling and a short search: for the many calls of a planner
  kUsual,     // up to a few seconds at 8 ranks and 32 micro-batches
  kThorough,  // ten times that
};

struct AutoScheduleOptions {
  SearchEffort effort = SearchEffort::kUsual;
  uint64_t seed = 1;
  // By rank: the peak that a schedule may reach in the simulation, at least its cap; empty: the caps. W
  // cannot be held back for all that comes: messages wait with their sender.
  std::vector<double> most_bytes;
};

struct AutoSchedule {
  // Ready to run, named "auto" unless a named one won. W placed (P2Policy::kPlaced), but where W in pieces
  // that fill the waits is faster (`fill`), or a named schedule with another policy was the best.
  Schedule schedule;
  double seconds = 0;  // simulated
  LowerBound bound;
  std::string method;  // what won: "local search", "list scheduling" or "named"
  std::string
      best_named;  // the best named schedule that fits, with its policy: "1f1b fill"; empty if none does
  double named_seconds = 0;  // its time; 0 without one
  long iterations = 0;       // moves of the local search

  // At most this much, relative to the bound, could a better schedule win. The search checks that the bound
  // is one: only rounding is cut off here.
  double gap() const { return bound.seconds > 0 ? std::max(0.0, seconds / bound.seconds - 1) : 0; }
  // Over the best named schedule.
  double gain() const { return named_seconds > 0 ? named_seconds / seconds : 1; }
};

// No schedule fits the caps, or none was found.
class NoScheduleFits : public Error {
 public:
  using Error::Error;
};

// `costs` has one entry a stage; `options` as for simulate, cap_per_rank being the bytes beside the fixed
// ones; its `timeline` plays no part. Throws Error for costs that simulate refuses, for caps below
// least_activation_bytes (stage_bytes.h), naming it, and where messages and layers need more than the caps:
// the last two are NoScheduleFits.
AutoSchedule auto_schedule(const std::vector<int>& rank_of_stage, int micro_batches,
                           const std::vector<StageCost>& costs, const SimulationOptions& options = {},
                           const AutoScheduleOptions& search = {});

// The placements that so many stages have on so many ranks: linear, V, looped; none where it does not divide.
std::vector<Placement> possible_placements(int stages, int ranks);

}  // namespace twobp
