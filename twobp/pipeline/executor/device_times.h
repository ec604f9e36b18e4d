// When a rank's F, I and W ran, by its device's own clock: the host only puts them in and runs ahead. All of
// it is empty on a CPU, where a call lasts as long as its work.
#pragma once

#include <array>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/pipeline/observer.h"

namespace twobp {

class DeviceTimes {
 public:
  // Seconds of a step by the device.
  struct Totals {
    double busy = 0;  // some op ran; two at once count once
    std::array<double, kIdleCauses> idle{};
  };

  // A step begins on `device`, all that was put in before being done. `on`: false for one that is recorded as
  // a graph, whose events are none of the device's.
  void start(const Device& device, bool on);
  // An F or an I of a stage (an index into what take() fills), in the compute stream: from open, but for what
  // is put in between pause and resume, until close. `before`: why nothing ran before it, if so.
  void open(double StageTimes::*seconds, int stage, IdleCause before);
  void pause();
  void resume();
  void close() { pause(); }
  // A W, in `stream`: before and after what it puts in.
  DeviceEvent begin_p2(const DeviceStream& stream) const;
  void end_p2(int stage, const DeviceStream& stream, const DeviceEvent& begin);
  // Whether some op was timed.
  bool any() const { return !spans_.empty(); }
  // When all is done: each stage's seconds in place of the host's.
  Totals take(std::vector<StageTimes>& stages);

 private:
  struct Span {
    double StageTimes::*seconds;
    int stage;
    IdleCause before;
    DeviceEvent begin, end;
  };

  bool on_ = false;
  DeviceStream compute_;
  DeviceEvent step_;
  Span open_{};
  std::vector<Span> spans_;
};

}  // namespace twobp
