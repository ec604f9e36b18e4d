// Works tick by tick: first every rank chooses by what was done before the tick, then all choices take effect.
#include <cstddef>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/schedule/generators/generators.h"

namespace twobp {
namespace {

class Placer {
 public:
  Placer(const Schedule& schedule, int most_in_flight)
      : schedule_(schedule),
        most_in_flight_(most_in_flight),
        forwards_(schedule.stages, 0),
        backwards_(schedule.stages, 0),
        ranks_(schedule.ranks.size()) {}

  std::vector<std::vector<Instruction>> run() {
    std::vector<size_t> running(ranks_.size());
    for (size_t rank = 0; rank < ranks_.size(); ++rank) running[rank] = rank;
    std::vector<Instruction> ran;
    while (!running.empty()) {
      ran.clear();
      for (size_t rank : running) choose(rank, ran);
      TWOBP_CHECK(!ran.empty(), "schedule '", schedule_.name, "': no rank can go on in this order of F and I");
      for (const Instruction& i : ran) {
        if (i.op == Op::kForward) ++forwards_[i.stage];
        if (i.op == Op::kBackwardP1) ++backwards_[i.stage];
      }
      std::erase_if(running, [&](size_t rank) {
        return ranks_[rank].at == schedule_.ranks[rank].size() && !has_pending(ranks_[rank]);
      });
    }
    std::vector<std::vector<Instruction>> lists;
    for (Rank& rank : ranks_) lists.push_back(std::move(rank.out));
    return lists;
  }

 private:
  struct Rank {
    size_t at = 0;                     // in the list of F and I
    std::vector<Instruction> pending;  // W in the order of their I
    size_t oldest = 0;
    int in_flight = 0;
    std::vector<Instruction> out;
  };

  static bool has_pending(const Rank& rank) { return rank.oldest < rank.pending.size(); }

  bool has_input(const Instruction& i) const {
    if (i.op == Op::kForward) return i.stage == 0 || forwards_[i.stage - 1] > i.micro_batch;
    return i.stage + 1 == schedule_.stages ? forwards_[i.stage] > i.micro_batch
                                           : backwards_[i.stage + 1] > schedule_.backward_order(i.micro_batch);
  }

  void choose(size_t index, std::vector<Instruction>& ran) {
    Rank& rank = ranks_[index];
    const auto& list = schedule_.ranks[index];
    if (rank.at < list.size()) {
      const Instruction& next = list[rank.at];
      const bool forward = next.op == Op::kForward;
      const bool room = !forward || rank.in_flight < most_in_flight_ || !has_pending(rank);
      if (room && has_input(next)) {
        if (forward) {
          ++rank.in_flight;
        } else {
          rank.pending.push_back({Op::kBackwardP2, next.stage, next.micro_batch});
        }
        rank.out.push_back(next);
        ran.push_back(next);
        ++rank.at;
        return;
      }
    }
    if (!has_pending(rank)) return;
    rank.out.push_back(rank.pending[rank.oldest++]);
    ran.push_back(rank.out.back());
    --rank.in_flight;
  }

  const Schedule& schedule_;
  const int most_in_flight_;
  std::vector<int> forwards_;   // F done before this tick, by stage
  std::vector<int> backwards_;  // the same for I
  std::vector<Rank> ranks_;
};

}  // namespace

Schedule place_p2(Schedule schedule, int most_in_flight) {
  schedule.ranks = Placer(schedule, most_in_flight).run();
  return schedule;
}

}  // namespace twobp
