#include "twobp/pipeline/wait.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "twobp/core/measure.h"

namespace twobp {
namespace {

// Between two looks. Sums and devices take hundreds of microseconds, and cores may be shared.
constexpr std::chrono::microseconds kPause{20};

}  // namespace

void Wait::block(double /*seconds*/) {
  std::this_thread::sleep_for(kPause);
}

void wait_for(Wait& wait, double timeout, const std::function<bool()>& others) {
  double deadline = awake_seconds() + timeout;
  size_t progress = wait.progress();
  while (true) {
    const bool again = others();
    if (wait.ready()) return;
    if (wait.progress() != progress) {
      progress = wait.progress();
      deadline = awake_seconds() + timeout;
    }
    const double left = deadline - awake_seconds();
    if (left <= 0) wait.fail(timeout);
    if (again) {
      std::this_thread::sleep_for(kPause);
    } else {
      wait.block(std::max(left, 1e-3));
    }
  }
}

}  // namespace twobp
