#include "twobp/transport/threads/mailbox.h"

#include "twobp/core/awake_clock.h"
#include "twobp/core/clock.h"

namespace twobp {

void Mailbox::put(Message message) {
  {
    const std::lock_guard lock(mutex_);
    messages_.push_back(std::move(message));
    arrivals_.fetch_add(1, std::memory_order_release);
  }
  changed_.notify_one();
}

bool Mailbox::take(int from, const Tag& tag, Message& message) {
  const std::lock_guard lock(mutex_);
  return take_locked(from, tag, message);
}

bool Mailbox::wait(int from, const Tag& tag, Message& message, double timeout, double spin,
                   const std::atomic<bool>& aborted) {
  const double spin_until = now_seconds() + spin;
  int64_t seen = -1;
  while (now_seconds() < spin_until && !aborted.load(std::memory_order_acquire)) {
    const int64_t arrivals = arrivals_.load(std::memory_order_acquire);
    if (arrivals == seen) continue;
    seen = arrivals;
    if (take(from, tag, message)) return true;
  }
  std::unique_lock lock(mutex_);
  bool taken = false;
  wait_patiently(changed_, lock, timeout,
                 [&] { return aborted.load(std::memory_order_acquire) || (taken = take_locked(from, tag, message)); });
  return taken;
}

void Mailbox::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

bool Mailbox::take_locked(int from, const Tag& tag, Message& message) {
  for (auto it = messages_.begin(); it != messages_.end(); ++it) {
    if (it->from != from || !(it->tag == tag)) continue;
    message = std::move(*it);
    messages_.erase(it);
    return true;
  }
  return false;
}

}  // namespace twobp
