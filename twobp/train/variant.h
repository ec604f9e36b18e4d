// The way to run a step. A trainer may change it from step to step without changing a bit of the result. The exception
// is a schedule that gives up the order of micro-batches (Schedule::allow_reorder: out-of-order files).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "twobp/pipeline/step_plan.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/train/config.h"

namespace twobp {

class Pipeline;
struct ModelSpec;
struct PipelineOptions;
struct SliceProfiles;

struct Variant {
  ScheduleSource schedule = "1f1b";
  P2Policy policy = P2Policy::kFill;
  P2Batching batching = P2Batching::kLoop;
  MemoryCap memory_cap = MemoryCap::automatic();
  // The basis of the automatic cap (StepOptions::standard). A schedule that was searched for under another schedule's
  // cap keeps that cap.
  std::optional<ScheduleSource> standard{};
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

// pipeline.run_ahead: whether a rank begins the next step when it has ended its part of the current one.

class Pipeline;

struct RunAhead {
  bool on = false;
  // Whether ranks also do not wait for the norm of all gradients, which clipping and float16 need. They take their step
  // as if it were neither clipped nor skipped, and take it back if it is (Update::settle).
  bool presumes = false;
  double gain = 1;  // simulated speed relative to a barrier

  static constexpr double kLeastGain = 1.02;  // "auto" requires more than this
};

// Decides by the configuration and, for "auto", by simulating the plan with the profiled costs. All processes use the
// first process's decision. Each calls this once its optimizers are made. `ties_ranks`: see Update. `batch` as for
// profiled_costs.
RunAhead decide_run_ahead(const Config& config, Pipeline& pipeline, const StepPlan& plan, bool ties_ranks,
                          const std::vector<double>& batch = {});

// "ranks begin the next step without waiting for each other (simulated: 1.07x as fast)".
std::string to_text(const RunAhead& run_ahead);

// `pipeline.schedule: "auto"`: the schedule that the auto-scheduler (plan/auto_schedule/auto_schedule.h) finds for the
// profile and the byte cap.

// The schedule found for this pipeline, with its p2 policy. Batching and cap are those of `asked`. The name says how
// the schedule was found, its predicted gain over the best named schedule under the same cap, and a bound on its
// distance from the optimum. The automatic cap is that of 1f1b or, with several stages per rank, of zb-v or looped-bfs.
// It holds in the search and in every step after it (Variant::standard). Throws Error if no schedule fits the
// cap. `batch` as for profiled_costs.
Variant auto_variant(const Pipeline& pipeline, int micro_batches, Variant asked, const std::vector<double>& batch = {});

// The seconds of a step of this schedule as simulated, without what lies outside F, I and W. `next_known`: whether the
// step knows the next batch (StepPlan::ahead).
double simulated_seconds(const ModelSpec& model, const SliceProfiles& slices, const PipelineOptions& options,
                         const Variant& variant, int micro_batches, bool next_known = false);

// The same pipeline with stages of their own for the model's frozen first layers, such as those of a reference model,
// whose F then fill waits (PipelineOptions::frozen_stages), if the simulated step is more than 2 % faster when the next
// batch is known, and not so much slower when it is not (can_have_frozen_stages).
PipelineOptions with_frozen_stages(const PipelineOptions& options, const ModelSpec& model, const SliceProfiles& slices,
                                   const Variant& variant, int micro_batches);

// For pipeline.schedule "auto" with gradients that may be streamed: the same pipeline with two stages on each rank,
// which form a V, if a step with streamed gradients is then more than 2 % faster as simulated. Under a V, the rank of
// the last stage has its W for the waits before its other stage's I; with one stage on each rank, no W can run before
// the end.
PipelineOptions with_v_for_streaming(const PipelineOptions& options, const ModelSpec& model,
                                     const SliceProfiles& slices, int micro_batches);

}  // namespace twobp
