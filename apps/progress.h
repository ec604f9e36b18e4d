// The progress line of a training run: rewritten in place on a terminal, a line each so many steps elsewhere.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "twobp/train/trainer.h"

namespace twobp {

class Progress {
 public:
  // `items`: what is counted a second, "tokens".
  Progress(int64_t total_steps, int64_t log_every, std::string_view items);

  void show(const StepResult& result);
  // Ends the line that is being rewritten, so that something else can be printed.
  void finish_line();

 private:
  int64_t total_;
  int64_t log_every_;
  std::string items_;
  bool terminal_;
  bool line_open_ = false;
  std::deque<double> recent_;  // seconds of the last steps
};

}  // namespace twobp
