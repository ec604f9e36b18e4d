// These options record chosen steps of a training run: --trace, --timeline, --trace-steps.
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

// Does nothing if no option names a file.
class TraceOutput {
 public:
  // Observes the trainer. Throws Error if a file cannot be written or the run has no such steps.
  TraceOutput(const TraceOptions& options, Trainer& trainer);

  // Call after every step. Writes the files once the last chosen step is done.
  void after_step();
  // Call at the end of the run. Writes the recorded steps if the run was interrupted earlier, and says where they are.
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
