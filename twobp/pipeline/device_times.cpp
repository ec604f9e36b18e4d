#include "twobp/pipeline/device_times.h"

#include <algorithm>
#include <utility>

namespace twobp {

void DeviceTimes::start(const Device& device, bool on) {
  on_ = on && device.asynchronous();
  spans_.clear();
  if (on_) step_ = device.compute().record_with_time();
}

DeviceEvent DeviceTimes::begin(const DeviceStream& stream) const {
  return on_ ? stream.record_with_time() : DeviceEvent();
}

void DeviceTimes::end(double StageTimes::*seconds, int stage, const DeviceStream& stream,
                      const DeviceEvent& begin) {
  if (on_) spans_.push_back({seconds, stage, begin, stream.record_with_time()});
}

DeviceTimes::Totals DeviceTimes::take(std::vector<StageTimes>& stages) {
  for (StageTimes& times : stages) times.forward = times.backward_p1 = times.backward_p2 = 0;
  std::vector<std::pair<double, double>> ran;  // since the step's begin
  for (const Span& span : std::exchange(spans_, {})) {
    const double begin = span.begin.seconds_since(step_);
    const double end = span.end.seconds_since(step_);
    stages[span.stage].*span.seconds += end - begin;
    ran.emplace_back(begin, end);
  }
  std::ranges::sort(ran);
  Totals totals;
  if (ran.empty()) return totals;
  totals.start_up = ran.front().first;
  double until = totals.start_up;
  for (const auto& [begin, end] : ran) {
    totals.gaps += std::max(0.0, begin - until);
    totals.busy += std::max(0.0, end - std::max(begin, until));
    until = std::max(until, end);
  }
  return totals;
}

}  // namespace twobp
