#include "twobp/transport/in_process.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"

namespace twobp {
namespace {

struct Message {
  int from = 0;
  Tag tag;
  Values values;
};

// What has arrived at one rank and was not yet asked for.
class Mailbox {
 public:
  void put(Message message) {
    {
      const std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
      arrivals_.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_one();
  }

  bool take(int from, const Tag& tag, Values& values) {
    const std::lock_guard lock(mutex_);
    return take_locked(from, tag, values);
  }

  // False after `deadline` or `aborted`.
  bool wait(int from, const Tag& tag, Values& values, double deadline, double spin,
            const std::atomic<bool>& aborted) {
    const double spin_until = now_seconds() + spin;
    int64_t seen = -1;
    while (now_seconds() < spin_until && !aborted.load(std::memory_order_acquire)) {
      const int64_t arrivals = arrivals_.load(std::memory_order_acquire);
      if (arrivals == seen) continue;
      seen = arrivals;
      if (take(from, tag, values)) return true;
    }
    std::unique_lock lock(mutex_);
    while (!aborted.load(std::memory_order_acquire)) {
      if (take_locked(from, tag, values)) return true;
      const double left = deadline - now_seconds();
      if (left <= 0) return false;
      changed_.wait_for(lock, std::chrono::duration<double>(left));
    }
    return false;
  }

  void wake() {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

 private:
  bool take_locked(int from, const Tag& tag, Values& values) {
    for (auto it = messages_.begin(); it != messages_.end(); ++it) {
      if (it->from != from || !(it->tag == tag)) continue;
      values = std::move(it->values);
      messages_.erase(it);
      return true;
    }
    return false;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Message> messages_;  // few at a time
  std::atomic<int64_t> arrivals_{0};
};

// What the endpoints share.
struct Group {
  explicit Group(int ranks) : mailboxes(ranks), contributions(ranks) {}

  std::vector<Mailbox> mailboxes;
  std::atomic<bool> aborted{false};
  std::mutex reason_mutex;
  std::string reason;

  // all_reduce: every rank leaves its tensor, the last one sums them in rank order.
  std::mutex reduce_mutex;
  std::condition_variable reduced;
  std::vector<at::Tensor> contributions;
  int arrived = 0;
  int64_t generation = 0;
  at::Tensor sum;
};

class InProcessTransport : public Transport {
 public:
  InProcessTransport(std::shared_ptr<Group> group, int rank, double spin)
      : group_(std::move(group)), rank_(rank), spin_(spin) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->mailboxes.size()); }

  void isend(int to, const Tag& tag, Values values) override {
    TWOBP_CHECK(to >= 0 && to < size(), "rank ", rank_, " sends to rank ", to, " of ", size());
    group_->mailboxes[to].put({rank_, tag, std::move(values)});
  }

  bool try_receive(int from, const Tag& tag, Values& values) override {
    throw_if_aborted();
    return group_->mailboxes[rank_].take(from, tag, values);
  }

  Values receive(int from, const Tag& tag, double timeout) override {
    Values values;
    if (group_->mailboxes[rank_].wait(from, tag, values, now_seconds() + timeout, spin_, group_->aborted))
      return values;
    throw_if_aborted();
    fail("rank ", rank_, " waited ", timeout, " s for ", to_string(tag), " from rank ", from,
         ": that rank is stuck or the time-out (pipeline.timeout) is too short");
  }

  void all_reduce_sum(at::Tensor& tensor, double timeout) override {
    std::unique_lock lock(group_->reduce_mutex);
    throw_if_aborted();
    const int64_t generation = group_->generation;
    group_->contributions[rank_] = tensor;
    if (++group_->arrived == size()) {
      group_->sum = group_->contributions[0].clone();
      for (int r = 1; r < size(); ++r) group_->sum.add_(group_->contributions[r]);
      for (auto& contribution : group_->contributions) contribution.reset();
      group_->arrived = 0;
      ++group_->generation;
      group_->reduced.notify_all();
    } else {
      const bool done = group_->reduced.wait_for(lock, std::chrono::duration<double>(timeout), [&] {
        return group_->generation != generation || group_->aborted.load(std::memory_order_acquire);
      });
      if (group_->generation == generation) {
        --group_->arrived;  // this rank leaves without the sum
        group_->contributions[rank_].reset();
        throw_if_aborted();
        TWOBP_CHECK(done, "rank ", rank_, " waited ", timeout, " s in all_reduce for the other ranks");
      }
    }
    tensor.copy_(group_->sum);
  }

  void abort(const std::string& reason) override {
    {
      const std::lock_guard lock(group_->reason_mutex);
      if (group_->aborted.exchange(true)) return;
      group_->reason = reason;
    }
    for (auto& mailbox : group_->mailboxes) mailbox.wake();
    const std::lock_guard lock(group_->reduce_mutex);
    group_->reduced.notify_all();
  }

 private:
  void throw_if_aborted() {
    if (!group_->aborted.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(group_->reason_mutex);
    throw Aborted(concat("rank ", rank_, " stopped: ", group_->reason));
  }

  std::shared_ptr<Group> group_;
  int rank_;
  double spin_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_in_process_transports(int ranks, double spin_seconds) {
  TWOBP_CHECK(ranks >= 1, "a pipeline needs at least one rank, got ", ranks);
  auto group = std::make_shared<Group>(ranks);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int r = 0; r < ranks; ++r)
    transports.push_back(std::make_unique<InProcessTransport>(group, r, spin_seconds));
  return transports;
}

std::string to_string(const Tag& tag) {
  return concat(tag.direction == Direction::kForward ? "the input" : "the output gradient", " of stage ",
                tag.stage, ", micro-batch ", tag.micro_batch, ", step ", tag.step);
}

}  // namespace twobp
