#include "twobp/transport/threads/in_process.h"

#include <atomic>
#include <mutex>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/transport/threads/mailbox.h"
#include "twobp/transport/time_out.h"

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

}  // namespace twobp
