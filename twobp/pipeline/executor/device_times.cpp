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
  step_ = record(compute_);
}

DeviceEvent DeviceTimes::record(const DeviceStream& stream) {
  if (used_ == events_.size()) {
    events_.push_back(stream.record_with_time());
  } else {
    stream.record_again(events_[used_]);
  }
  return events_[used_++];
}

void DeviceTimes::open(double StageTimes::*seconds, int stage, IdleCause before) {
  if (on_) open_ = {seconds, stage, before, record(compute_), {}};
}

void DeviceTimes::pause() {
  if (!on_) return;
  open_.end = record(compute_);
  spans_.push_back(open_);
}

void DeviceTimes::resume() {
  if (on_) open_.begin = record(compute_);
}

DeviceEvent DeviceTimes::begin_p2(const DeviceStream& stream) {
  return on_ ? record(stream) : DeviceEvent();
}

void DeviceTimes::end_p2(int stage, const DeviceStream& stream, const DeviceEvent& begin) {
  if (!on_) return;
  spans_.push_back({&StageTimes::backward_p2, stage, IdleCause::kMessage, begin, record(stream)});
}

DeviceTimes::Totals DeviceTimes::take(std::vector<StageTimes>& stages) {
  for (StageTimes& times : stages) times.forward = times.backward_p1 = times.backward_p2 = 0;
  struct Ran {
    double begin, end;  // since the step's begin
    IdleCause before;
  };
  std::vector<Ran> all;
  for (const Span& span : std::exchange(spans_, {})) {
    const Ran ran = {span.begin.seconds_since(step_), span.end.seconds_since(step_), span.before};
    stages[span.stage].*span.seconds += ran.end - ran.begin;
    all.push_back(ran);
  }
  std::ranges::sort(all, {}, &Ran::begin);
  Totals totals;
  double until = 0;
  for (const Ran& ran : all) {
    const IdleCause cause = until == 0 ? IdleCause::kStartUp : ran.before;
    totals.idle[static_cast<int>(cause)] += std::max(0.0, ran.begin - until);
    totals.busy += std::max(0.0, ran.end - std::max(ran.begin, until));
    until = std::max(until, ran.end);
  }
  return totals;
}

}  // namespace twobp
