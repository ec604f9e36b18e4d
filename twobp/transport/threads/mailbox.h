// What has arrived at one rank and was not yet asked for: put in by any thread, taken out by the rank's.
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
  DeviceEvent ready;  // when they are what they should be, where they are on a device
};

class Mailbox {
 public:
  void put(Message message);
  // The oldest with this sender and tag, moved into `message`; false: there is none.
  bool take(int from, const Tag& tag, Message& message);
  // Waits for it, at first spinning for `spin` seconds. False after `timeout` seconds, or once `aborted`,
  // which whoever sets it makes known by wake().
  bool wait(int from, const Tag& tag, Message& message, double timeout, double spin,
            const std::atomic<bool>& aborted);
  void wake();

 private:
  bool take_locked(int from, const Tag& tag, Message& message);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Message> messages_;  // few at a time
  std::atomic<int64_t> arrivals_{0};
};

}  // namespace twobp
