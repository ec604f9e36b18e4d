// Whether training waits for its data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace twobp {

class InputWait {
 public:
  explicit InputWait(int workers) : workers_(workers) {}

  // To be told of each step: the seconds that it waited for its batch, and those that it then took. The text
  // of a warning, once, when the waits of ten steps or more are above 1 % of their time and a second in all.
  // The first two steps, in which the loader begins, do not count.
  std::optional<std::string> after_step(double waited, double took);

 private:
  int workers_;
  int64_t steps_ = 0;
  double waited_ = 0;
  double took_ = 0;
  bool warned_ = false;
};

}  // namespace twobp
