// The input is a trace as `twobp train --trace` writes it. It contains the schedule and the costs of its run.
#include "fuzz/input.h"
#include "twobp/trace/read_trace.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto trace = fuzz::accepted([&] { return parse_trace(fuzz::text(data, size), "fuzz.json"); });
  if (!trace) return 0;
  fuzz::require(trace->run && !trace->steps.empty(), "the trace has no run or no steps");
  for (const StepReport& step : trace->steps) {
    fuzz::require(step.events.size() == trace->run->schedule.ranks.size(),
                  "the number of ranks differs from the schedule");
  }
  return 0;
}
