// Weight gradients on a device: W is put into a stream of low priority, from which the device itself fills
// what F and I leave free. On a CPU, where W runs when it is called, all of this is a plain call.
#pragma once

#include <deque>
#include <span>

#include "twobp/nn/device/device.h"
#include "twobp/nn/saved.h"

namespace twobp {

class P2Stream {
 public:
  explicit P2Stream(Device device = {}) : device_(std::move(device)) {}

  const Device& device() const { return device_; }

  // After an I, on the thread whose current stream is device().compute(): W that reads what it left may begin
  // behind this point.
  DeviceEvent ready() const { return device_.compute().record(); }

  // Runs `w`, which puts work into the current stream: that of W, behind all of `ready`. The memory of
  // `saved` may be freed as soon as this returns; the device gives it to others when W is done.
  template <typename W>
  void run(std::span<const DeviceEvent> ready, std::span<Saved* const> saved, const W& w) {
    if (!device_.asynchronous()) return w();
    const OnStream here(device_.weights());
    begin(ready, saved);
    w();
    if (!records_) under_way_.push_back(device_.weights().record());
  }

  // Whether to put in more W ahead of its turn. The host runs ahead of the device, so that it seldom waits
  // for a message: it offers W after every instruction instead, some at a time, so that the stash of what is
  // far from done is not all of the step's and W's own memory stays small. Never on a CPU.
  bool wants_more() { return device_.asynchronous() && has_room(); }
  // While a graph is recorded (see WorkGraph) nothing is done: all W there is goes in.
  void record(bool on) { records_ = on; }
  // Whether so little is under way that more may be put in. Always on a CPU, where nothing is.
  bool has_room();

  // What is put into device().compute() from now on begins after all W: before gradients are read.
  void join() { device_.compute().wait(device_.weights().record()); }

 private:
  void forget_passed();
  void begin(std::span<const DeviceEvent> ready, std::span<Saved* const> saved);

  Device device_;
  bool records_ = false;
  std::deque<DeviceEvent> under_way_;  // the end of each W
};

}  // namespace twobp
