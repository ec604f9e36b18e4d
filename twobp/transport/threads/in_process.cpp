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
    TWOBP_CHECK(to >= 0 && to < size(), "rank ", rank_, " sends to rank ", to, ", but there are ", size(),
                " ranks");
    group_->mailboxes[to].put({rank_, tag, std::move(values), device_.current().record()});
  }

  bool try_receive(int from, const Tag& tag, Values& values) override {
    throw_if_aborted();
    Message message;
    if (!group_->mailboxes[rank_].take(from, tag, message)) return false;
    values = device_.fetch(std::move(message.values), message.ready);
    return true;
  }

  Values receive(int from, const Tag& tag, double timeout) override {
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
    transports.push_back(std::make_unique<InProcessTransport>(group, r, spin_seconds,
                                                              devices.empty() ? Device() : devices.at(r)));
  return transports;
}

std::string to_string(const Tag& tag) {
  switch (tag.kind) {
    case MessageKind::kForward:
    case MessageKind::kBackward:
      return concat(tag.kind == MessageKind::kForward ? "the input" : "the output gradient", " of stage ",
                    tag.stage, ", micro-batch ", tag.micro_batch, ", step ", tag.step);
    case MessageKind::kEvaluation:
      return concat("the input of stage ", tag.stage, ", micro-batch ", tag.micro_batch, ", batch ", tag.step,
                    " of an evaluation");
    case MessageKind::kTiedGradient:
      return concat("a gradient of a weight that stages share, step ", tag.step);
    case MessageKind::kWeights:
      return concat("updated weights, step ", tag.step);
    case MessageKind::kStepReport:
      return concat("the report of step ", tag.step);
    case MessageKind::kClock:
      return "a reading of the clock";
    case MessageKind::kPart:
    case MessageKind::kSum:
      return "a sum (a collective)";
    case MessageKind::kBroadcast:
      return "a broadcast (a collective)";
    case MessageKind::kGather:
      return "a gathering (a collective)";
    case MessageKind::kBarrier:
      return "a barrier (a collective)";
    case MessageKind::kEndOfWork:
      return "the end of work (a collective)";
    case MessageKind::kVerdict:
      return "a verdict (a collective)";
    case MessageKind::kNone:
      break;
  }
  return "a message";
}

}  // namespace twobp
