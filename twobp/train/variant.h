// The way to run a step. A trainer may change it from step to step without changing a bit of the result. The exception
// is a schedule that gives up the order of micro-batches (Schedule::allow_reorder: out-of-order files).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/pipeline/step_plan.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp {

class Pipeline;

struct Variant {
  ScheduleSource schedule = "1f1b";
  P2Policy policy = P2Policy::kFill;
  P2Batching batching = P2Batching::kLoop;
  MemoryCap memory_cap = MemoryCap::automatic();
  // The basis of the automatic cap, by rank (see auto_caps). If empty, it is the peaks of `schedule` itself with p2
  // off. A schedule that was searched for under another schedule's cap keeps that cap.
  std::vector<int64_t> standard_peaks{};
  bool operator==(const Variant&) const = default;
};

// Whether the schedule gives up the order of micro-batches. Then its bits differ from those that all other schedules
// share.
bool reorders(const Variant& variant);

// The plan of a step for this variant.
StepPlan make_plan(const Pipeline& pipeline, const Variant& variant, int micro_batches,
                   P2Order p2_order = P2Order::kOldest);

// A warning if the schedule exceeds the variant's cap in bytes, because its F and I alone need more, else empty. It
// names the bytes that the fullest rank needs. An op that cannot fit runs anyway.
std::string warning_of_cap(const Pipeline& pipeline, const Variant& variant, int micro_batches);

}  // namespace twobp
