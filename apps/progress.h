// The progress line of a training run. A terminal shows one line that is rewritten in place; other outputs get a new
// line every few steps.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "twobp/train/trainer.h"

namespace twobp {

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

}  // namespace twobp
