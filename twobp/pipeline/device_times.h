// When a rank's F, I and W ran, by its device's own clock: the host only puts them in and runs ahead. All of
// it is empty on a CPU, where a call lasts as long as its work.
#pragma once

#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/pipeline/observer.h"

namespace twobp {

class DeviceTimes {
 public:
  // Seconds of a step by the device.
  struct Totals {
    double start_up = 0;  // from the step's begin to the first op
    double busy = 0;      // some op ran; two at once count once
    double gaps = 0;      // between the first op and the last, none ran
  };

  // A step begins, all that was put in before being done. `on`: false for one that is recorded as a graph,
  // whose events are none of the device's.
  void start(const Device& device, bool on);
  // Before and after what an op puts into `stream`: seconds of `stage` (an index into what take() fills).
  DeviceEvent begin(const DeviceStream& stream) const;
  void end(double StageTimes::*seconds, int stage, const DeviceStream& stream, const DeviceEvent& begin);
  // Whether some op was timed.
  bool any() const { return !spans_.empty(); }
  // When all is done: each stage's seconds in place of the host's.
  Totals take(std::vector<StageTimes>& stages);

 private:
  struct Span {
    double StageTimes::*seconds;
    int stage;
    DeviceEvent begin, end;
  };

  bool on_ = false;
  DeviceEvent step_;
  std::vector<Span> spans_;
};

}  // namespace twobp
