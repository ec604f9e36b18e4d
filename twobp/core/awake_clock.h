// The clock for time-outs. It stops while the whole process is suspended (Ctrl-Z, a scheduler's suspend, a sleeping
// machine). During that time this process did not wait, and its peers may have been suspended as well.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace twobp {

// A waiting thread looks at the clock at least this often, in seconds.
inline constexpr double kLongestSleep = 0.5;

// Seconds as now_seconds() counts them, without the part over 1 s of any gap between two calls in this process: the
// process was suspended then, or did not wait. Any thread may call it.
double awake_seconds();

// Waits on `changed` until there() is true. Returns false if it is not true after `timeout` awake seconds.
template <typename There>
bool wait_patiently(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, double timeout,
                    There&& there) {
  const double deadline = awake_seconds() + timeout;
  while (!there()) {
    const double left = deadline - awake_seconds();
    if (left <= 0) return false;
    changed.wait_for(lock, std::chrono::duration<double>(std::min(left, kLongestSleep)));
  }
  return true;
}

}  // namespace twobp
