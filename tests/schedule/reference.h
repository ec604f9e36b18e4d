// A second, slow simulation to compare with: it ticks through whole time units and does at each what an
// executor would, with no thought for speed. Costs and delays are whole numbers of at least one per piece of
// W.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "twobp/schedule/simulate.h"

namespace twobp {

class ReferenceExecutor {
 public:
  ReferenceExecutor(const Schedule& schedule, const std::vector<StageCost>& costs,
                    const SimulationOptions& options)
      : schedule_(schedule), costs_(costs), options_(options), ranks_(schedule.ranks.size()) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (const Instruction& range : schedule.ranks[r]) {
        for (int i = 0; i < range.count; ++i) {
          ranks_[r].list.push_back({range.op, range.stage, range.micro_batch + i});
        }
      }
    }
  }

  Simulation run() {
    Simulation result;
    result.ranks.resize(ranks_.size());
    for (now_ = 0; !all_done(); now_ += 1) {
      // Messages that leave at this tick must be there before anybody decides to fill a wait.
      for (bool moved = true; moved;) {
        moved = false;
        for (auto& rank : ranks_) moved |= advance(rank);
      }
      for (auto& rank : ranks_) fill(rank);
    }
    for (size_t r = 0; r < ranks_.size(); ++r) {
      result.ranks[r].timeline = ranks_[r].timeline;
      result.ranks[r].peak_bytes = ranks_[r].peak;
      for (const auto& op : ranks_[r].timeline) result.ranks[r].busy += op.end - op.begin;
      result.step_seconds = std::max(result.step_seconds, ranks_[r].free_at);
    }
    return result;
  }

 private:
  struct Piece {
    int stage, micro_batch, left;
  };
  struct Rank {
    std::vector<Instruction> list;
    size_t at = 0;
    double free_at = 0;
    double bytes = 0;
    double later = 0;  // added to bytes when the op under way is done
    double peak = 0;
    std::deque<Piece> pending;
    std::vector<SimulatedOp> timeline;
  };

  bool all_done() const {
    for (const auto& rank : ranks_) {
      if (rank.at < rank.list.size() || rank.free_at > now_) return false;
    }
    return true;
  }

  void run_op(Rank& rank, Op op, int stage, int m, double seconds, double at_end) {
    if (op == Op::kBackwardP2 && !rank.timeline.empty() && rank.timeline.back().op == op &&
        rank.timeline.back().stage == stage && rank.timeline.back().micro_batch == m &&
        rank.timeline.back().end == rank.free_at && rank.free_at == now_) {
      rank.timeline.back().end += seconds;
    } else {
      rank.timeline.push_back({op, stage, m, now_, now_ + seconds});
    }
    rank.free_at = now_ + seconds;
    rank.later = at_end;
  }

  void run_piece(Rank& rank, std::deque<Piece>::iterator piece) {
    const StageCost& cost = costs_[piece->stage];
    run_op(rank, Op::kBackwardP2, piece->stage, piece->micro_batch, cost.backward_p2 / cost.p2_units,
           -cost.stash_bytes / cost.p2_units);
    if (--piece->left == 0) rank.pending.erase(piece);
  }

  // One step of a free rank, if it can make one without filling a wait.
  bool advance(Rank& rank) {
    if (rank.free_at > now_) return false;
    rank.bytes += std::exchange(rank.later, 0);
    rank.peak = std::max(rank.peak, rank.bytes);
    if (rank.at == rank.list.size()) return false;
    const auto [op, s, m, count] = rank.list[rank.at];
    const StageCost& cost = costs_[s];
    const size_t index = static_cast<size_t>(&rank - ranks_.data());
    const double cap = options_.cap_per_rank.empty() ? 0 : options_.cap_per_rank[index];
    switch (op) {
      case Op::kSendForward:
      case Op::kSendBackward: {
        const int to = op == Op::kSendForward ? s + 1 : s - 1;
        messages_[{op == Op::kSendForward ? Op::kRecvForward : Op::kRecvBackward, to, m}] =
            now_ + options_.message_seconds;
        break;
      }
      case Op::kRecvForward:
      case Op::kRecvBackward: {
        const auto found = messages_.find({op, s, m});
        if (found == messages_.end() || found->second > now_) return false;
        break;
      }
      case Op::kForward:
      case Op::kBackwardP1: {
        const double need = cost.activation_bytes * (op == Op::kForward ? 1 : -1) +
                            (op == Op::kForward ? 0 : cost.stash_bytes);
        if (cap > 0 && need > 0 && rank.bytes + need > cap && !rank.pending.empty()) {
          run_piece(rank, rank.pending.begin());
          return true;
        }
        if (op == Op::kForward) {
          rank.bytes += need;
          run_op(rank, op, s, m, cost.forward, 0);
        } else {
          run_op(rank, op, s, m, cost.backward_p1, need);
          rank.pending.push_back({s, m, cost.p2_units});
        }
        break;
      }
      case Op::kBackward:
        run_op(rank, Op::kBackwardP1, s, m, cost.backward_p1, 0);
        rank.timeline.push_back({Op::kBackwardP2, s, m, rank.free_at, rank.free_at + cost.backward_p2});
        rank.free_at += cost.backward_p2;
        rank.later = -cost.activation_bytes;
        break;
      case Op::kBackwardP2: {
        const auto piece =
            std::find_if(rank.pending.begin(), rank.pending.end(),
                         [s = s, m = m](const Piece& p) { return p.stage == s && p.micro_batch == m; });
        if (piece != rank.pending.end()) {
          run_piece(rank, piece);
          return true;
        }
        break;
      }
    }
    ++rank.at;
    rank.peak = std::max(rank.peak, rank.bytes);
    return true;
  }

  void fill(Rank& rank) {
    if (!schedule_.fills() || rank.free_at > now_ || rank.at == rank.list.size() || rank.pending.empty())
      return;
    run_piece(rank, rank.pending.begin());
  }

  const Schedule& schedule_;
  const std::vector<StageCost>& costs_;
  const SimulationOptions& options_;
  double now_ = 0;
  std::vector<Rank> ranks_;
  std::map<std::tuple<Op, int, int>, double> messages_;
};

}  // namespace twobp
