// A trace as `twobp train --trace` writes it, with the schedule and the costs of its run.
#include "fuzz/input.h"
#include "twobp/trace/read_trace.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto trace = fuzz::accepted([&] { return parse_trace(fuzz::text(data, size), "fuzz.json"); });
  if (!trace) return 0;
  fuzz::require(trace->run && !trace->steps.empty(), "a trace without its run, or without steps");
  for (const StepReport& step : trace->steps) {
    fuzz::require(step.events.size() == trace->run->schedule.ranks.size(), "ranks without events");
  }
  return 0;
}
