#include "twobp/pipeline/executor/device_times.h"

#include <algorithm>
#include <utility>

namespace twobp {

void DeviceTimes::start(const Device& device, bool on) {
  on_ = on && device.asynchronous();
  spans_.clear();
  used_ = 0;
  if (!on_) return;
  compute_ = device.compute();
  step_ = record();
}

DeviceEvent DeviceTimes::record() {
  if (used_ == events_.size()) {
    events_.push_back(compute_.record_with_time());
  } else {
    compute_.record_again(events_[used_]);
  }
  return events_[used_++];
}

void DeviceTimes::open(double StageTimes::*seconds, int stage, IdleCause before) {
  if (on_) open_ = {seconds, stage, before, record(), {}};
}

void DeviceTimes::pause() {
  if (!on_) return;
  open_.end = record();
  spans_.push_back(open_);
}

void DeviceTimes::resume() {
  if (on_) open_.begin = record();
}

void DeviceTimes::end_p2(int stage, const DeviceEvent& begin) {
  if (on_) spans_.push_back({&StageTimes::backward_p2, stage, IdleCause::kMessage, begin, record()});
}

DeviceTimes::Totals DeviceTimes::take(std::vector<StageTimes>& stages) {
  for (StageTimes& times : stages) times.forward = times.backward_p1 = times.backward_p2 = 0;
  Totals totals;
  double until = 0;  // since the step's begin
  for (const Span& span : std::exchange(spans_, {})) {
    const double begin = span.begin.seconds_since(step_);
    const double seconds = span.end.seconds_since(step_) - begin;
    const IdleCause cause = until == 0 ? IdleCause::kStartUp : span.before;
    totals.idle[static_cast<int>(cause)] += std::max(0.0, begin - until);
    totals.busy += seconds;
    stages[span.stage].*span.seconds += seconds;
    until = begin + seconds;
  }
  return totals;
}

}  // namespace twobp
