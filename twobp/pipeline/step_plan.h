// What a step does, apart from its batch: the order of each rank's instructions, where W runs, and the bytes that ranks
// may hold. Nothing in it changes during a step (Pipeline::plan).
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/pipeline/memory/memory_cap.h"
#include "twobp/pipeline/p2_batching.h"
#include "twobp/schedule/check/leading_forwards.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

// How W runs, and what ranks may hold. It changes no bit of the results.
struct StepOptions {
  P2Batching batching = P2Batching::kLoop;
  MemoryCap memory_cap = MemoryCap::automatic();
  P2Order p2_order = P2Order::kOldest;  // of the W that is left at the end
  // The basis of the automatic cap, by rank (see auto_caps). If empty, it is the peaks of the schedule itself with p2
  // off.
  std::vector<int64_t> standard_peaks{};
  bool operator==(const StepOptions&) const = default;
};

struct StepPlan {
  Schedule schedule;
  StepOptions options;
  LeadingForwards leading;    // of the schedule
  std::vector<int64_t> caps;  // by rank: bytes of activations and stash; 0: no cap
  // Whether a rank runs W while it waits. On devices, the waits are those of the simulated step (w_places), because the
  // host runs ahead of them.
  bool fills_waits = false;
  std::vector<std::vector<int>> w_places;  // see p2_places.h; empty: not on devices, or no wait runs W
  std::vector<int64_t> fixed;              // by rank: bytes of parameters, gradients and optimizer, for which caps hold

  int64_t cap(int rank) const { return caps.empty() ? 0 : caps[rank]; }
};

}  // namespace twobp
