#include "twobp/core/wait.h"

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

void wait_for(Wait& wait, const Patience& patience, const std::function<bool()>& others) {
  const double begin = now_seconds();
  double deadline = awake_seconds() + patience.timeout;
  size_t progress = wait.progress();
  while (true) {
    const bool again = others && others();
    if (wait.ready()) break;
    if (wait.progress() != progress) {
      progress = wait.progress();
      deadline = awake_seconds() + patience.timeout;
    }
    const double left = deadline - awake_seconds();
    if (left <= 0) wait.fail(patience.timeout);
    if (again) {
      std::this_thread::sleep_for(kPause);
    } else {
      wait.block(std::max(left, 1e-3));
    }
  }
  if (patience.waits != nullptr) patience.waits->push_back({wait.cause(), begin, now_seconds()});
}

}  // namespace twobp
