// Weight gradients on a device. W is launched in a stream of low priority, so the device itself runs it where
// F and I leave capacity free. On a CPU, W runs when it is called, and all of this is a plain call.
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

  // Call after an I, on the thread whose current stream is device().compute(). W that uses the results of
  // this I may begin after the returned event.
  DeviceEvent ready() const { return device_.compute().record(); }

  // Runs `w`, which launches work into the current stream. This is the stream of W, after all of `ready`.
  // `saved` may be released as soon as this returns. Its tensors are kept until W is done, or until
  // release_oldest().
  template <typename W>
  void run(std::span<const DeviceEvent> ready, std::span<Saved* const> saved, const W& w) {
    if (!device_.asynchronous()) return w();
    const OnStream here(device_.weights());
    begin(ready, saved);
    w();
    under_way_.back().end = device_.weights().record();
  }
  // Whether W under way keeps tensors. Never on a CPU.
  bool keeps() const { return !under_way_.empty(); }
  // Frees the tensors that the oldest W under way keeps. Work launched into device().compute() from now on
  // begins after that W, so it may reuse the memory.
  void release_oldest();

  // Whether to launch more W ahead of its turn. The host runs ahead of the device, so it seldom waits for a
  // message. It therefore offers W after every instruction, a few at a time: this limits the stash that is
  // held and W's own memory. Never on a CPU.
  bool wants_more() { return device_.asynchronous() && has_room(); }
  // Whether so little W is under way that more may be launched. Always on a CPU, where none is.
  bool has_room();

  // Work launched into device().compute() from now on begins after all W. Call it before gradients are read.
  void join();
  // The same when a step has failed, perhaps because the device has: then no work will run any more.
  void give_up();

  // While it lives, a graph is recorded (see WorkGraph), after `begin`. No recorded work runs yet, so no
  // event passes and all pending W is launched.
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
