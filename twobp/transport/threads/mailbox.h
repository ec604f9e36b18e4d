// Messages that have arrived at one rank and have not been received yet. Any thread adds them; the rank's thread takes
// them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/transport/transport.h"

namespace twobp {

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
