#include <algorithm>

#include "twobp/schedule/check/walk.h"

namespace twobp {
namespace {

bool leads(const Schedule& schedule, const Instruction& instruction) {
  if (instruction.count != 1) return false;
  return instruction.op == Op::kSendForward || instruction.op == Op::kRecvForward ||
         (instruction.op == Op::kForward && !schedule.is_last(instruction.stage));
}

}  // namespace

LeadingForwards leading_forwards(const Schedule& schedule) {
  LeadingForwards leading;
  leading.unreceived.resize(schedule.ranks.size());
  std::vector<Instruction> receives;  // of all messages sent
  RankWalk walk(schedule);
  for (bool gone_on = true; gone_on;) {
    gone_on = false;
    for (int rank = 0; rank < schedule.rank_count(); ++rank) {
      for (; walk.can_go(rank) && leads(schedule, walk.at(rank)); gone_on = true) {
        if (is_send(walk.at(rank).op)) receives.push_back(other_side(walk.at(rank)));
        walk.advance(rank, [](int, const Instruction&, int) {});
      }
    }
  }
  leading.end = walk.indices();
  for (const Instruction& receive : receives) {
    const int rank = schedule.rank_of_stage[receive.stage];
    const auto& list = schedule.ranks[rank];
    const auto end = list.begin() + static_cast<std::ptrdiff_t>(leading.end[rank]);
    if (std::find(list.begin(), end, receive) == end) leading.unreceived[rank].push_back(receive);
  }
  return leading;
}

}  // namespace twobp
