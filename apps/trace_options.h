// The options that record what chosen steps of a training run did: --trace, --timeline, --trace-steps.
#pragma once

#include <memory>
#include <string>

#include "twobp/trace/recorder.h"
#include "twobp/train/trainer.h"

namespace CLI {
class App;
}

namespace twobp {

struct TraceOptions {
  std::string trace;
  std::string timeline;
  std::string steps;
};

void add_trace_options(CLI::App& command, TraceOptions& options);

// Nothing at all unless a file is asked for.
class TraceOutput {
 public:
  // Observes the trainer. Throws Error if a file can't be written or the run has no such steps.
  TraceOutput(const TraceOptions& options, Trainer& trainer);

  // After every step: writes the files once the last chosen step is done.
  void after_step();
  // At the end of the run: writes what there is if it was interrupted before, and says what is where.
  void finish();

 private:
  void write();

  TraceOptions options_;
  Trainer* trainer_ = nullptr;
  TraceSteps steps_;
  std::shared_ptr<TraceRecorder> recorder_;
  bool written_ = false;
};

}  // namespace twobp
