#include "twobp/core/measure.h"

namespace twobp {
namespace {

constexpr double kLongestGap = 1;  // longest gap that counts: a sleep, and as much again for a busy machine

}  // namespace

double awake_seconds() {
  static std::mutex mutex;
  static double seen = now_seconds();
  static double stood_still = 0;
  // Without it, a thread could see the time after a suspension but not the suspension.
  const std::lock_guard lock(mutex);
  const double now = now_seconds();
  stood_still += std::max(0.0, now - seen - kLongestGap);
  seen = now;
  return now - stood_still;
}

}  // namespace twobp
