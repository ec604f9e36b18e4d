// A schedule together with the other settings that the executor needs.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/pipeline/memory/memory_cap.h"
#include "twobp/pipeline/p2_batching.h"
#include "twobp/schedule/check/leading_forwards.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

struct StepSetup {
  Schedule schedule;
  LeadingForwards leading;  // of the schedule
  P2Batching batching = P2Batching::kLoop;
  MemoryCap memory_cap = MemoryCap::automatic();
  std::vector<int64_t> standard_peaks;  // by rank, for the automatic cap
};

}  // namespace twobp
