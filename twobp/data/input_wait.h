// Detects that training waits for its data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace twobp {

class InputWait {
 public:
  explicit InputWait(int workers) : workers_(workers) {}

  // Call this for each step with the seconds that it waited for its batch and the seconds that it then took. Returns a
  // warning, once, if over ten or more steps the waits exceed 1 % of the time and a second in total. The first two
  // steps, in which the loader starts, do not count.
  std::optional<std::string> after_step(double waited, double took);

 private:
  int workers_;
  int64_t steps_ = 0;
  double waited_ = 0;
  double took_ = 0;
  bool warned_ = false;
};

}  // namespace twobp
