// What measuring and waiting need: clocks, the median of measurements, the speed of a link.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

namespace twobp {

inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The clock for time-outs. It stops while the whole process is suspended (Ctrl-Z, a scheduler's suspend, a sleeping
// machine). During that time this process did not wait, and its peers may have been suspended as well.

// A waiting thread looks at the clock at least this often, in seconds.
inline constexpr double kLongestSleep = 0.5;

// Seconds as now_seconds() counts them, without the part over 1 s of any gap between two calls in this process (a
// sleep, and as much again for a busy machine): the process was suspended then, or did not wait. Any thread may call
// it.
inline double awake_seconds() {
  static std::mutex mutex;
  static double seen = now_seconds();
  static double stood_still = 0;
  // Without it, a thread could see the time after a suspension but not the suspension.
  const std::lock_guard lock(mutex);
  const double now = now_seconds();
  stood_still += std::max(0.0, now - seen - 1);
  seen = now;
  return now - stood_still;
}

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

// The median of measurements.

// Takes at least one number. For an even count, returns the mean of the middle two. NaN if one of them is NaN.
inline double median(std::vector<double> values) {
  const auto unknown = std::find_if(values.begin(), values.end(), [](double value) { return std::isnan(value); });
  if (unknown != values.end()) return *unknown;
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// The speed of a link between two ranks, for measurements and plans.
struct LinkSpeed {
  double latency = 0;           // seconds from a send until a small message has been received
  double bytes_per_second = 0;  // of large messages; 0: no limit
};

}  // namespace twobp
