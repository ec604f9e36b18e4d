// What a thread waits for, as a value, and the one function that waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace twobp {

enum class WaitCause : uint8_t {
  kMessage,    // of another rank
  kExperts,    // tokens on their way to the experts of another replica, or back
  kGradients,  // sums of gradients over replicas
  kNorm,       // a number that needs the gradients of all ranks, or of all replicas
  kDevice,     // the rank's own work
  kInput,      // a batch
};

class Wait {
 public:
  virtual ~Wait() = default;
  virtual WaitCause cause() const = 0;
  // Looks whether it is there. Never blocks.
  virtual bool ready() = 0;
  // Blocks until it is there, or may be there, at most `seconds`. The default sleeps for 20 microseconds.
  virtual void block(double seconds);
  // A number that grows while what is awaited comes nearer. The time-out then begins anew.
  virtual size_t progress() const { return 0; }
  // Throws Error that names what did not come within `timeout` seconds.
  [[noreturn]] virtual void fail(double timeout) const = 0;
};

// A wait that is over. The times are those of now_seconds().
struct Waited {
  WaitCause cause = WaitCause::kMessage;
  double begin = 0;
  double end = 0;
};

// How long to wait, in seconds, and where to note it.
struct Patience {
  Patience(double timeout, std::vector<Waited>* waits = nullptr)  // NOLINT(google-explicit-constructor): mostly a time
      : timeout(timeout), waits(waits) {}
  double timeout;
  std::vector<Waited>* waits;
};

// Waits. Meanwhile, calls `others` between two looks, which keeps other things going, and returns whether it must be
// called again soon. Throws what `fail` throws after the time-out.
void wait_for(Wait& wait, const Patience& patience, const std::function<bool()>& others = {});

}  // namespace twobp
