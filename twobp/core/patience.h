// What time-outs are counted in: a clock that does not run on while the whole process stands still (Ctrl-Z, a
// scheduler's suspend, a machine put to sleep), since then nobody was waiting and its peers may have stood
// still as well.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace twobp {

// Whoever waits looks at the clock at least this often, seconds.
inline constexpr double kLongestSleep = 0.5;

// Seconds as now_seconds() counts them, less those over 1 s between any two calls in this process: nobody
// waited then, or nobody could. Any thread may call it.
double awake_seconds();

// Waits on `changed` until there() is true; false: it is not after `timeout` awake seconds.
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
