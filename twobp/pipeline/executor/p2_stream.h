// Weight gradients on a device: W is put into a stream of low priority, from which the device itself fills
// what F and I leave free. On a CPU, where W runs when it is called, all of this is a plain call.
#pragma once

#include <deque>
#include <span>
#include <vector>

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

  // Runs `w`, which puts work into the current stream: that of W, behind all of `ready`. `saved` may be
  // released as soon as this returns; the tensors in it are kept until W is done, or until there is no other
  // way.
  template <typename W>
  void run(std::span<const DeviceEvent> ready, std::span<Saved* const> saved, const W& w) {
    if (!device_.asynchronous()) return w();
    const OnStream here(device_.weights());
    begin(ready, saved);
    w();
    under_way_.back().end = device_.weights().record();
  }
  // Whether W is under way that keeps tensors. Never on a CPU.
  bool keeps() const { return !under_way_.empty(); }
  // Frees what the oldest of it keeps, for what is put into device().compute() from now on: it begins after
  // it.
  void release_oldest();

  // Whether to put in more W ahead of its turn. The host runs ahead of the device, so that it seldom waits
  // for a message: it offers W after every instruction instead, some at a time, so that the stash of what is
  // far from done is not all of the step's and W's own memory stays small. Never on a CPU.
  bool wants_more() { return device_.asynchronous() && has_room(); }
  // Whether so little is under way that more may be put in. Always on a CPU, where nothing is.
  bool has_room();

  // What is put into device().compute() from now on begins after all W: before gradients are read.
  void join();
  // Of a step that is given up.
  void forget() { under_way_.clear(); }

  // While it lives a graph is recorded (see WorkGraph), of what is behind `begin`. Nothing is done meanwhile,
  // so that nothing can be seen to have passed: all W there is goes in.
  class Recording {
   public:
    Recording(P2Stream& stream, const DeviceEvent& begin);
    ~Recording() { stream_.records_ = false; }
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    P2Stream& stream_;
  };

 private:
  struct UnderWay {
    DeviceEvent end;
    std::vector<at::Tensor> kept;
  };

  void release_passed();
  void begin(std::span<const DeviceEvent> ready, std::span<Saved* const> saved);

  Device device_;
  bool records_ = false;
  std::deque<UnderWay> under_way_;
};

}  // namespace twobp
