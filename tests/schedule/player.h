// This file judges schedules naively, as a check of the validator. It plays all ranks instruction by instruction and
// looks up every dependency in the set of finished ops.
#pragma once

#include <set>
#include <tuple>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

class Player {
 public:
  explicit Player(const Schedule& schedule) : schedule_(schedule) {
    for (const auto& list : schedule.ranks) {
      auto& single = lists_.emplace_back();
      for (const Instruction& range : list) {
        for (int i = 0; i < range.count; ++i) single.push_back({range.op, range.stage, range.micro_batch + i});
      }
    }
  }

  // Returns whether every op runs once, with its inputs, in micro-batch order, and nothing is missing at the end.
  bool plays_to_the_end() {
    std::vector<size_t> at(lists_.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < lists_.size(); ++rank) {
        while (at[rank] < lists_[rank].size() && may_run(lists_[rank][at[rank]])) {
          const Instruction& done = lists_[rank][at[rank]++];
          if (!done_.emplace(done.op, done.stage, done.micro_batch).second) return false;
          moved = true;
        }
      }
    }
    for (size_t rank = 0; rank < lists_.size(); ++rank) {
      if (at[rank] < lists_[rank].size()) return false;
    }
    return complete();
  }

 private:
  bool has(Op op, int s, int m) const { return done_.count({op, s, m}) > 0; }
  bool has_backward(int s, int m) const { return has(Op::kBackwardP1, s, m) || has(Op::kBackward, s, m); }
  bool local(int a, int b) const { return schedule_.rank_of_stage[a] == schedule_.rank_of_stage[b]; }
  bool in_order(Op op, int s, int m) const {
    if (schedule_.allow_reorder || m == 0) return true;
    if (op == Op::kForward) return has(op, s, m - 1);
    if (op == Op::kBackwardP2) return has(op, s, m - 1) || has(Op::kBackward, s, m - 1);
    return has_backward(s, m - 1);
  }

  bool may_run(const Instruction& i) const {
    const auto [op, s, m, count] = i;
    switch (op) {
      case Op::kForward:
        return in_order(op, s, m) && (schedule_.is_first(s) ? true
                                      : local(s, s - 1)     ? has(op, s - 1, m)
                                                            : has(Op::kRecvForward, s, m));
      case Op::kBackward:
        if (!in_order(Op::kBackwardP2, s, m)) return false;
        [[fallthrough]];
      case Op::kBackwardP1:
        return has(Op::kForward, s, m) && !has_backward(s, m) && in_order(op, s, m) &&
               (schedule_.is_last(s) ? true
                : local(s, s + 1)    ? has_backward(s + 1, m)
                                     : has(Op::kRecvBackward, s, m));
      case Op::kBackwardP2:
        return has(Op::kBackwardP1, s, m) && in_order(op, s, m);
      case Op::kSendForward:
        return has(Op::kForward, s, m);
      case Op::kSendBackward:
        return has_backward(s, m);
      case Op::kRecvForward:
        return !has(Op::kForward, s, m) && has(Op::kSendForward, s - 1, m);
      case Op::kRecvBackward:
        return !has_backward(s, m) && has(Op::kSendBackward, s + 1, m);
    }
    return false;
  }

  bool complete() const {
    bool backward = false;
    for (const auto& [op, s, m] : done_) backward |= op == Op::kBackward || op == Op::kBackwardP1;
    for (int s = 0; s < schedule_.stages; ++s) {
      for (int m = 0; m < schedule_.micro_batches; ++m) {
        if (!has(Op::kForward, s, m)) return false;
        if (backward && s >= schedule_.frozen && !has_backward(s, m)) return false;
        if (has(Op::kBackwardP1, s, m) && !has(Op::kBackwardP2, s, m)) return false;
        if (has(Op::kSendForward, s, m) && !has(Op::kRecvForward, s + 1, m)) return false;
        if (has(Op::kSendBackward, s, m) && !has(Op::kRecvBackward, s - 1, m)) return false;
      }
    }
    return true;
  }

  const Schedule& schedule_;
  std::vector<std::vector<Instruction>> lists_;
  std::set<std::tuple<Op, int, int>> done_;
};

}  // namespace twobp
