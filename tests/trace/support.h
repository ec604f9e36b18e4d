// The tests of the pictures share these helpers: a real step of a small model, and events constructed by hand.
#pragma once

#include <string>
#include <vector>

#include "tests/pipeline/support.h"
#include "twobp/core/measure.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/trace/recorder.h"

namespace twobp::test {

inline std::vector<StepReport> run_steps(Pipeline& pipeline, const StepPlan& plan, int steps) {
  TraceRecorder recorder({1, steps});
  for (int i = 0; i < steps; ++i) {
    StepRequest options = step_request();
    options.step = i + 1;
    options.want_events = recorder.wants_events(i + 1);
    options.update = update_by([](int) {
      const double begin = now_seconds();
      while (now_seconds() < begin + 2e-4) {
      }
      return UpdateTimes{now_seconds() - begin};
    });
    recorder.on_step(pipeline.run(plan, random_batch(plan.schedule.micro_batches), options));
  }
  return recorder.reports();
}

// Runs steps of a LLaMa with three blocks. Each entry of `split` is a stage.
inline std::vector<StepReport> real_steps(std::string_view schedule, P2Policy policy, int micro_batches = 3,
                                          int steps = 2, const std::vector<int>& split = {4, 4},
                                          MemoryCap memory_cap = 0) {
  const ModelSpec model = small_llama(3);  // 8 layers
  Pipeline pipeline(model, no_costs(model), options_of(split));
  return run_steps(pipeline, pipeline.plan(schedule, micro_batches, policy, {P2Batching::kLoop, memory_cap}), steps);
}

// Makes a run that describes itself, as `twobp train --trace` writes it. The first step is atypical and left out.
inline Trace traced_run_of(const ModelSpec& model, const std::string& title, P2Policy policy, std::string_view schedule,
                           int micro_batches, int steps, const std::vector<int>& split,
                           const std::vector<int>& rank_of_stage = {}, MemoryCap memory_cap = 0) {
  Pipeline pipeline(model, measure_profile(model, random_fields(1), 0.01), options_of(split, rank_of_stage));
  const StepPlan plan = pipeline.plan(schedule, micro_batches, policy, {P2Batching::kLoop, memory_cap});
  Trace trace;
  trace.title = title;
  trace.facts = {{"micro-batches", std::to_string(micro_batches)}};
  trace.steps = run_steps(pipeline, plan, steps + 1);
  trace.steps.erase(trace.steps.begin());
  trace.run = TracedRun{plan.schedule, profiled_costs(pipeline.layer_costs()), {}};
  for (const int64_t cap : plan.caps) trace.run->cap_per_rank.push_back(static_cast<double>(cap));
  return trace;
}

inline Trace traced_run(const std::string& title = "a title", P2Policy policy = P2Policy::kFill,
                        std::string_view schedule = "1f1b", int micro_batches = 3, int steps = 2,
                        const std::vector<int>& split = {4, 4}, const std::vector<int>& rank_of_stage = {},
                        MemoryCap memory_cap = 0) {
  return traced_run_of(small_llama(3), title, policy, schedule, micro_batches, steps, split, rank_of_stage, memory_cap);
}

inline Trace real_trace(const std::string& title = "a title") {
  Trace trace;
  trace.title = title;
  trace.facts = {{"micro-batches", "3"}};
  trace.steps = real_steps("1f1b", P2Policy::kFill);
  return trace;
}

// This name tries to break out of strings, scripts and tags, and ends in invalid UTF-8.
inline const std::string kHostileName =
    "</script><script>document.body.dataset.broken='yes'</script><!-- \"'\\ \n\x01 & \xe2\x80\xa8 \xff";

}  // namespace twobp::test
