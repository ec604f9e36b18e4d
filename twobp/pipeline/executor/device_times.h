// Times of a rank's F, I and W, which follow each other in its compute stream, by its device's own clock. The host's
// clock would not do, because the host only launches the work and runs ahead of it. On a CPU, where a call lasts as
// long as its work, all of this does nothing.
#pragma once

#include <array>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/pipeline/observer.h"

namespace twobp {

class DeviceTimes {
 public:
  // Seconds of a step on the device's clock.
  struct Totals {
    double busy = 0;  // of F, I and W
    std::array<double, kIdleCauses> idle{};
  };

  // Begins a step on `device`; all earlier work on it is done. `on`: false while a step is recorded as a graph, because
  // the device never reaches the events recorded then.
  void start(const Device& device, bool on);
  // Times an F or I of a stage (an index into the argument of take()), from open to close, without the time between
  // pause and resume. `before`: the cause if the device was idle before it.
  void open(double StageTimes::*seconds, int stage, IdleCause before);
  void pause();
  void resume();
  void close() { pause(); }
  // Times a W, between F and I or while one is paused: call them before and after launching it.
  DeviceEvent begin_p2() { return on_ ? record() : DeviceEvent(); }
  void end_p2(int stage, const DeviceEvent& begin);
  // Whether any op was timed.
  bool any() const { return !spans_.empty(); }
  // Call when all work is done. Replaces each stage's seconds, which are the host's, by the device's.
  Totals take(std::vector<StageTimes>& stages);

 private:
  struct Span {
    double StageTimes::*seconds;
    int stage;
    IdleCause before;
    DeviceEvent begin, end;
  };

  // Events of earlier steps are recorded anew, since making them takes longer.
  DeviceEvent record();

  bool on_ = false;
  DeviceStream compute_;
  DeviceEvent step_;
  Span open_{};
  std::vector<Span> spans_;
  std::vector<DeviceEvent> events_;
  size_t used_ = 0;  // of events_, in this step
};

}  // namespace twobp
