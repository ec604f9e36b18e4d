// Chosen steps in the Trace Event Format (a JSON array), for https://ui.perfetto.dev and chrome://tracing.
// Each rank has a track with its ops, waits and messages. Arrows go from sends to receives. The memory of
// each rank and the fullest expert of each layer are shown, too.
#pragma once

#include <string>
#include <vector>

#include "twobp/pipeline/observer.h"

namespace twobp {

struct Trace {
  std::string title;              // "llama, 2 stages, 1f1b with p2 fill"
  std::vector<StepReport> steps;  // with events
  int slices = 1;                 // of a micro-batch
};

// The track of whole steps; those of the ranks follow. Perfetto does not accept track 0, and shows the
// process's own number first.
inline constexpr int kStepTrack = 1;

std::string trace_json(const Trace& trace);

// "F3", "W3 model.layers.2.mlp.down_proj", "send", "idle: waiting for a message".
// With slices, "F1.2" is slice 2 of micro-batch 1.
std::string event_name(const Event& event, int slices = 1);

// Steps [first, last], counted from 1.
struct TraceSteps {
  int64_t first = 1;
  int64_t last = 1;
};

// The steps that `text` ("5" or "3-5") chooses among the steps of a run. Empty: the second to the fourth, or
// the last ones of a shorter run. Throws Error if the text is not such a range, asks for more than 100 steps,
// or for steps that the run does not do.
TraceSteps choose_trace_steps(const std::string& text, const TraceSteps& run);

// Keeps the events of chosen steps.
class TraceRecorder : public Observer {
 public:
  explicit TraceRecorder(const TraceSteps& steps) : steps_(steps) {}

  bool wants_events(int64_t step) const override { return step >= steps_.first && step <= steps_.last; }
  void on_step(const StepReport& report) override;
  // True once the last of the steps was seen.
  bool complete() const { return complete_; }
  const std::vector<StepReport>& reports() const { return reports_; }

 private:
  TraceSteps steps_;
  bool complete_ = false;
  std::vector<StepReport> reports_;
};

}  // namespace twobp
