#include "twobp/transport/threads/in_process.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

// State that the endpoints share.
struct Mailboxes {
  explicit Mailboxes(int ranks) : mailboxes(ranks) {}

  std::vector<Mailbox> mailboxes;
  std::atomic<bool> aborted{false};
  std::mutex reason_mutex;
  std::string reason;
};

class InProcessTransport : public Transport {
 public:
  InProcessTransport(std::shared_ptr<Mailboxes> group, int rank, double spin, const Device& device)
      : group_(std::move(group)), rank_(rank), spin_(spin), device_(device) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->mailboxes.size()); }

  void isend(int to, const Tag& tag, Values values) override {
    check_receiver(to);
    group_->mailboxes[to].put({rank_, tag, std::move(values), device_.current().record()});
  }

  bool try_receive(int from, const Tag& tag, Values& values) override {
    check_sender(from);
    throw_if_aborted();
    Message message;
    if (!group_->mailboxes[rank_].take(from, tag, message)) return false;
    values = device_.fetch(std::move(message.values), message.ready);
    return true;
  }

  Values receive(int from, const Tag& tag, double timeout) override {
    check_sender(from);
    Message message;
    if (group_->mailboxes[rank_].wait(from, tag, message, timeout, spin_, group_->aborted))
      return device_.fetch(std::move(message.values), message.ready);
    throw_if_aborted();
    fail_waiting(rank_, timeout, tag, from);
  }

  std::optional<int> unsent_to() override {
    throw_if_aborted();
    return std::nullopt;
  }

  void abort(const std::string& reason) override {
    {
      const std::lock_guard lock(group_->reason_mutex);
      if (group_->aborted.exchange(true)) return;
      group_->reason = reason;
    }
    for (auto& mailbox : group_->mailboxes) mailbox.wake();
  }

 private:
  void throw_if_aborted() {
    if (!group_->aborted.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(group_->reason_mutex);
    throw Aborted(concat("rank ", rank_, " stopped: ", group_->reason));
  }

  std::shared_ptr<Mailboxes> group_;
  int rank_;
  double spin_;
  Device device_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_in_process_transports(int ranks, double spin_seconds,
                                                                   const std::vector<Device>& devices) {
  TWOBP_CHECK(ranks >= 1, "a pipeline needs at least one rank, got ", ranks);
  auto group = std::make_shared<Mailboxes>(ranks);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int r = 0; r < ranks; ++r)
    transports.push_back(
        std::make_unique<InProcessTransport>(group, r, spin_seconds, devices.empty() ? Device() : devices.at(r)));
  return transports;
}

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

bool Mailbox::has(int from, const Tag& tag) {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(messages_, [&](const Message& one) { return one.from == from && one.tag == tag; });
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
