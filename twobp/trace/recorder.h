// The observer that keeps the events of chosen steps. `trace.h` writes them for Perfetto, `timeline.h` for a browser.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "twobp/pipeline/observer.h"
#include "twobp/trace/traced_run.h"

namespace twobp {

struct Trace {
  std::string title;                                       // "llama, 2 stages, 1f1b with p2 fill"
  std::vector<std::pair<std::string, std::string>> facts;  // shown next to it: {"micro-batches", "4"}
  std::vector<StepReport> steps;                           // with events
  std::vector<std::string> step_names;                     // instead of the steps' numbers, if any
  bool simulated = false;                                  // not of a real run: no messages, no loss
  bool abstract = false;                                   // times have no unit, bytes are thousandths of a micro-batch
  std::optional<TracedRun> run;                            // the run's schedule and costs, if known
  std::optional<StepReport> predicted;                     // the prediction to compare each step with, with events
};

// Steps [first, last], counted from 1.
struct TraceSteps {
  int64_t first = 1;
  int64_t last = 1;
};

// The steps that `text` ("5" or "3-5") chooses among the steps of a run. Empty: the second to the fourth, or the last
// ones of a shorter run. Throws Error if the text is not such a range, asks for more than 100 steps, or for steps that
// the run does not do.
TraceSteps choose_trace_steps(const std::string& text, const TraceSteps& run);

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

// "F3", "W3 model.layers.2.mlp.down_proj", "send", "idle: waiting for a message".
// With slices, "F1.2" is slice 2 of micro-batch 1.
std::string event_name(const Event& event, int slices = 1);
// "start-up", "waiting for a message", ...: texts for readers who have not read the code.
std::string_view idle_text(IdleCause cause);

// The stages whose ops appear in a rank's events, in order.
std::vector<int> stages_of(const std::vector<Event>& events);

}  // namespace twobp
