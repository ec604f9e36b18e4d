// How a step is run. A trainer may change it from step to step without changing a bit of the result, except
// for a schedule that gives up the order of micro-batches (Schedule::allow_reorder: out-of-order files).
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/pipeline/step_setup.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp {

class Pipeline;

struct Variant {
  ScheduleSource schedule = "1f1b";
  P2Policy policy = P2Policy::kFill;
  P2Batching batching = P2Batching::kLoop;
  MemoryCap memory_cap = MemoryCap::automatic();
  // What the automatic cap is made of, by rank (see auto_caps); empty: the peaks of `schedule` itself with p2
  // off. A schedule that was looked for under the cap of another keeps that cap.
  std::vector<int64_t> standard_peaks{};
};

// Whether it gives up the order of micro-batches, and with it the bits that all other schedules share.
bool reorders(const Variant& variant);

// The setup of a step that is run so.
StepSetup make_setup(const Pipeline& pipeline, const Variant& variant, int micro_batches);

}  // namespace twobp
