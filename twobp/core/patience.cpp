#include "twobp/core/patience.h"

#include "twobp/core/clock.h"

namespace twobp {
namespace {

constexpr double kLongestGap = 1;  // of what counts: a sleep, and as much again for a busy machine

}  // namespace

double awake_seconds() {
  static std::mutex mutex;
  static double seen = now_seconds();
  static double stood_still = 0;
  const std::lock_guard lock(mutex);  // or a thread would see the time after a stop without the stop
  const double now = now_seconds();
  stood_still += std::max(0.0, now - seen - kLongestGap);
  seen = now;
  return now - stood_still;
}

}  // namespace twobp
