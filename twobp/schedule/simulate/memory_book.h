// Internal to this folder: the bytes of every rank and stage during a simulation, and their peaks.
#pragma once

#include <functional>
#include <queue>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"
#include "twobp/schedule/simulate/stage_model.h"

namespace twobp {

class MemoryBook {
 public:
  MemoryBook(int stages, const std::vector<int>& rank_of_stage, int ranks)
      : rank_of_stage_(rank_of_stage), stages_(stages), ranks_(ranks), later_(ranks) {}

  double bytes(int rank) const { return ranks_[rank].bytes; }
  const Peak& rank_peak(int rank) const { return ranks_[rank].peak; }
  const Peak& stage_peak(int stage) const { return stages_[stage].peak; }

  // The op takes from `begin` to `end`.
  void grow(int stage, const Growth& by, double begin, double end, Op op, int micro_batch) {
    grow(ranks_[rank_of_stage_[stage]], by.peak, by.held, {0, begin, op, stage, micro_batch}, end);
    grow(stages_[stage], by.peak, by.held, {0, begin, op, stage, micro_batch}, end);
  }
  void add(int stage, double bytes, double now, Op op, int micro_batch) {
    if (bytes != 0) grow(stage, {0, 0, bytes, 0}, now, now, op, micro_batch);
  }
  // Moves bytes from one stage to another of the same rank.
  void hand_over(int from, int to, double bytes, double now, Op op, int micro_batch) {
    if (bytes == 0) return;
    stages_[from].bytes -= bytes;
    grow(stages_[to], 0, bytes, {0, now, op, to, micro_batch}, now);
  }

  // A change that another rank makes at `time`. It counts from this rank's next op on.
  void add_later(int stage, double bytes, double time, Op op, int micro_batch) {
    if (bytes != 0) later_[rank_of_stage_[stage]].push({time, bytes, op, stage, micro_batch});
  }
  void settle(int rank, double now) {
    auto& later = later_[rank];
    while (!later.empty() && later.top().time <= now) {
      const Change change = later.top();
      later.pop();
      add(change.stage, change.bytes, change.time, change.op, change.micro_batch);
    }
  }

 private:
  struct Account {
    double bytes = 0;
    Peak peak;
  };
  struct Change {
    double time, bytes;
    Op op;
    int stage, micro_batch;
    bool operator>(const Change& other) const { return time > other.time; }
  };

  static void grow(Account& account, double peak, double held, Peak during, double end) {
    if (account.bytes + peak > account.peak.bytes) {
      account.peak = during;
      account.peak.bytes = account.bytes + peak;
    }
    account.bytes += held;
    if (account.bytes > account.peak.bytes) {
      account.peak = during;
      account.peak.bytes = account.bytes;
      account.peak.seconds = end;
    }
  }

  const std::vector<int>& rank_of_stage_;
  std::vector<Account> stages_;
  std::vector<Account> ranks_;
  std::vector<std::priority_queue<Change, std::vector<Change>, std::greater<>>> later_;
};

}  // namespace twobp
