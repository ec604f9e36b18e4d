// What a training run shows: a line of progress, --metrics, and --trace with --trace-steps.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "twobp/trace/trace.h"
#include "twobp/train/trainer.h"

namespace twobp {

// A terminal shows one line that is rewritten in place; other outputs get a new line every few steps.
class Progress {
 public:
  // `items`: the unit of the speed, such as "tokens".
  Progress(int64_t total_steps, int64_t log_every, std::string_view items);

  void show(const StepResult& result);
  // Ends the line that is being rewritten, so that other output can follow.
  void finish_line();

 private:
  int64_t total_;
  int64_t log_every_;
  std::string items_;
  bool terminal_;
  bool line_open_ = false;
  std::deque<double> recent_;  // seconds of the last steps
};

// The file of --metrics: one JSON object for each step, each step once, even if the run was stopped and
// resumed.
class MetricsFile {
 public:
  // Opens the file and keeps its content. If `path` is empty, there is no file. All members throw Error,
  // which names the file.
  explicit MetricsFile(std::string path);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // Empties the file.
  void clear();

  // Drops lines of steps after `step`, which were done after the checkpoint and will be done again. Also
  // drops lines that are not JSON, because they were cut off. Does this only for an ordinary file.
  void keep_until(int64_t step);
  // Waits for a slow reader of a pipe. If a signal stops the run meanwhile, the line is lost.
  void write(const nlohmann::json& line);

 private:
  void open();
  void close();
  [[noreturn]] void fail_to_write() const;

  std::string path_;
  int fd_ = -1;
};

struct TraceOptions {
  std::string file;
  std::string steps;
};

// Records chosen steps. Does nothing if the options name no file.
class TraceOutput {
 public:
  // Observes the trainer. Throws Error if the file cannot be written or the run has no such steps.
  TraceOutput(const TraceOptions& options, Trainer& trainer);

  // Call after every step. Writes the file once the last chosen step is done.
  void after_step();
  // Call at the end of the run. Writes the recorded steps if the run was interrupted earlier, and says where
  // they are.
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
