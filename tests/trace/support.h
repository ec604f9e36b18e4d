// What the tests of the pictures share: a real step of a small model, and its events put together by hand.
#pragma once

#include <string>
#include <vector>

#include "tests/pipeline/support.h"
#include "twobp/trace/recorder.h"

namespace twobp::test {

// Steps of a LLaMa of three blocks on as many stages as `split` has entries.
inline std::vector<StepReport> real_steps(std::string_view schedule, P2Policy policy, int micro_batches = 3,
                                          int steps = 2, const std::vector<int>& split = {4, 4},
                                          int64_t memory_cap = 0) {
  const ModelSpec model = small_llama(3);  // 8 layers
  Pipeline pipeline(model, no_costs(model), options_of(split));
  TraceRecorder recorder({1, steps});
  for (int i = 0; i < steps; ++i) {
    StepOptions options = step_options();
    options.step = i + 1;
    options.want_events = recorder.wants_events(i + 1);
    options.finish = [](int) {
      const double begin = now_seconds();
      while (now_seconds() < begin + 2e-4) {
      }
      return now_seconds() - begin;
    };
    recorder.on_step(
        pipeline.run(pipeline.plan(schedule, micro_batches, policy, P2Batching::kLoop, memory_cap),
                     random_batch(micro_batches), options));
  }
  return recorder.reports();
}

inline Trace real_trace(const std::string& title = "a title") {
  Trace trace;
  trace.title = title;
  trace.facts = {{"micro-batches", "3"}};
  trace.steps = real_steps("1f1b", P2Policy::kFill);
  return trace;
}

// What a name may be that wants to break out of strings, scripts and tags, and is no UTF-8 at its end.
inline const std::string kHostileName =
    "</script><script>document.body.dataset.broken='yes'</script><!-- \"'\\ \n\x01 & \xe2\x80\xa8 \xff";

}  // namespace twobp::test
