// Transport between threads of one process, with a mailbox per rank. Tensors are passed on without a copy, unless they
// go to another GPU.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Endpoints of `ranks` ranks that communicate with each other. Waits spin for `spin_seconds` before they sleep, which
// pays if every rank has a core of its own. `devices` has each rank's device and is empty for the CPU. A tensor of
// another GPU is copied from peer to peer, with events and without a wait of the host.
std::vector<std::unique_ptr<Transport>> make_in_process_transports(int ranks, double spin_seconds,
                                                                   const std::vector<Device>& devices = {});

// Messages that have arrived at one rank and have not been received yet. Any thread adds them; the rank's thread takes
// them.
struct Message {
  int from = 0;
  Tag tag;
  Values values;
  DeviceEvent ready;  // for tensors on a device: passes when their contents are written
};

class Mailbox {
 public:
  void put(Message message);
  // Moves the oldest message with this sender and tag into `message`. Returns false if there is none.
  bool take(int from, const Tag& tag, Message& message);
  bool has(int from, const Tag& tag);
  // Waits for the message, at first spinning for `spin` seconds. Returns false after `timeout` seconds, or once
  // `aborted` is set. The thread that sets `aborted` must call wake().
  bool wait(int from, const Tag& tag, Message& message, double timeout, double spin, const std::atomic<bool>& aborted);
  void wake();

 private:
  bool take_locked(int from, const Tag& tag, Message& message);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Message> messages_;  // few at a time
  std::atomic<int64_t> arrivals_{0};
};

}  // namespace twobp
