// What a rank waits for, as a value, and the one function that waits.
#pragma once

#include <cstddef>
#include <functional>

namespace twobp {

// A message, sums over replicas, a device.
class Wait {
 public:
  virtual ~Wait() = default;
  // Looks whether it is there. Never blocks.
  virtual bool ready() = 0;
  // Blocks until it is there, or may be there, at most `seconds`. The default sleeps for 20 microseconds.
  virtual void block(double seconds);
  // A number that grows while what is awaited comes nearer. The time-out then begins anew.
  virtual size_t progress() const { return 0; }
  // Throws Error that names what did not come within `timeout` seconds.
  [[noreturn]] virtual void fail(double timeout) const = 0;
};

// Waits. Meanwhile, calls `others` between two looks, which keeps other things going, and returns whether it must be
// called again soon. Throws what `fail` throws after `timeout` seconds.
void wait_for(Wait& wait, double timeout, const std::function<bool()>& others);

}  // namespace twobp
