#include "twobp/schedule/check/buffering.h"

#include "twobp/schedule/check/walk.h"

namespace twobp {
namespace {

// The slowest possible receiver: all other ranks go as far as they can before it takes its next message.
MostBuffered most_for(const Schedule& schedule, int receiver) {
  RankWalk ranks(schedule);
  MostBuffered most;
  int waiting = 0;
  std::vector<int> ready;
  std::vector<bool> queued(schedule.ranks.size(), true);
  queued[receiver] = true;  // never enters the queue
  for (int rank = 0; rank < schedule.rank_count(); ++rank) {
    if (rank != receiver) ready.push_back(rank);
  }
  const auto visit = [&](int rank, const Instruction& instruction, int) {
    if (is_send(instruction.op) && schedule.rank_of_stage[other_side(instruction).stage] == receiver) ++waiting;
    if (rank == receiver && is_receive(instruction.op)) --waiting;
  };
  const auto advance = [&](int rank) {
    const int woken = ranks.advance(rank, visit);
    if (woken < 0 || queued[woken]) return;
    queued[woken] = true;
    ready.push_back(woken);
  };
  while (true) {
    while (!ready.empty()) {
      const int rank = ready.back();
      ready.pop_back();
      queued[rank] = false;
      while (ranks.can_go(rank)) advance(rank);
    }
    if (!ranks.can_go(receiver)) return most;
    if (is_receive(ranks.at(receiver).op) && waiting > most.messages) {
      most = {waiting, static_cast<int>(ranks.index(receiver))};
    }
    advance(receiver);
  }
}

}  // namespace

std::vector<MostBuffered> most_buffered(const Schedule& schedule) {
  std::vector<MostBuffered> most;
  for (int rank = 0; rank < schedule.rank_count(); ++rank) most.push_back(most_for(schedule, rank));
  return most;
}

}  // namespace twobp
