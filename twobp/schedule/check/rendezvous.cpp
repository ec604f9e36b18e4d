#include "twobp/schedule/check/rendezvous.h"

#include <algorithm>
#include <utility>

#include "twobp/schedule/check/walk.h"

namespace twobp {
namespace {

// Both sides of a message go on together.
class RendezvousWalk {
 public:
  explicit RendezvousWalk(const Schedule& schedule) : schedule_(schedule), positions_(schedule.ranks.size()) {}

  std::vector<size_t> run() {
    for (int rank = schedule_.rank_count() - 1; rank >= 0; --rank) ready_.push_back(rank);
    while (!ready_.empty()) {
      const int rank = ready_.back();
      ready_.pop_back();
      while (advance(rank)) {
      }
    }
    return indices_of(positions_);
  }

 private:
  bool done(int rank) const { return positions_[rank].done(schedule_.ranks[rank]); }
  const Instruction& at(int rank) const { return positions_[rank].at(schedule_.ranks[rank]); }
  int micro_batch(int rank) const { return positions_[rank].micro_batch(schedule_.ranks[rank]); }
  void go_on(int rank) { positions_[rank].go_on(schedule_.ranks[rank]); }

  bool advance(int rank) {
    if (done(rank)) return false;
    const Instruction& next = at(rank);
    if (is_compute(next.op)) {
      go_on(rank);
      return true;
    }
    const Instruction wanted = other_side(next);
    const int peer = schedule_.rank_of_stage[wanted.stage];
    if (done(peer)) return false;
    const Instruction& stands = at(peer);
    if (stands.op != wanted.op || stands.stage != wanted.stage || micro_batch(peer) != micro_batch(rank)) {
      return false;
    }
    go_on(rank);
    go_on(peer);
    ready_.push_back(peer);
    return true;
  }

  const Schedule& schedule_;
  std::vector<ListCursor> positions_;
  std::vector<int> ready_;
};

}  // namespace

std::vector<size_t> rendezvous_stops(const Schedule& schedule) {
  return RendezvousWalk(schedule).run();
}

Schedule order_for_rendezvous(Schedule schedule) {
  const auto slot = [&](int stage, int m) { return static_cast<size_t>(stage) * schedule.micro_batches + m; };
  std::vector<std::vector<Instruction>> lists(schedule.ranks.size());
  std::vector<double> now(schedule.ranks.size(), 0);
  std::vector<double> forward_sent(slot(schedule.stages, 0), 0);
  std::vector<double> backward_sent(slot(schedule.stages, 0), 0);
  const auto sent = [&](Op receive, int stage, int m) -> double& {
    return (receive == Op::kRecvForward ? forward_sent : backward_sent)[slot(stage, m)];
  };
  walk_in_time(
      schedule,
      [&](int rank, const Instruction& instruction, int m) {
        const Instruction one{instruction.op, instruction.stage, m};
        if (is_receive(one.op)) {  // it was placed together with its send
          now[rank] = std::max(now[rank], sent(one.op, one.stage, m));
          return;
        }
        auto& list = lists[rank];
        if (is_send(one.op)) {
          const Instruction receive = other_side(one);
          list.push_back(one);
          lists[schedule.rank_of_stage[receive.stage]].push_back(receive);
          sent(receive.op, receive.stage, m) = now[rank];
          return;
        }
        now[rank] += one.op == Op::kBackward ? 2 : 1;
        const bool goes_on = m > instruction.micro_batch && !list.empty() && list.back().op == one.op &&
                             list.back().stage == one.stage && list.back().micro_batch + list.back().count == m;
        if (goes_on) {
          ++list.back().count;
        } else {
          list.push_back(one);
        }
      },
      [&](int rank, const Instruction& next, int m) {
        return is_receive(next.op) ? std::max(now[rank], sent(next.op, next.stage, m)) : now[rank];
      });
  schedule.ranks = std::move(lists);
  return schedule;
}

}  // namespace twobp
