// Internal to this folder: runs all ranks of a schedule side by side, in time proportional to its
// instructions.
#pragma once

#include <cstddef>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// The message that a receive waits for, as its sender names it: 2RECV_F5 waits for 1SEND_F5.
inline Op sender_op(Op receive) {
  return receive == Op::kRecvForward ? Op::kSendForward : Op::kSendBackward;
}
inline int sender_stage(const Instruction& receive) {
  return receive.op == Op::kRecvForward ? receive.stage - 1 : receive.stage + 1;
}

// Calls visit(rank, instruction, micro_batch) for every micro-batch of every instruction, a rank's in order,
// and a receive only after its send. Returns where each rank stopped: an index into its list, its size when
// the rank ran to the end; anything less is a deadlock. Stages, micro-batches and placement must be in range.
template <typename Visit>
std::vector<size_t> walk(const Schedule& schedule, Visit&& visit) {
  struct Position {
    size_t index = 0;
    int offset = 0;  // within the instruction's range
  };
  const auto slot = [&](int stage, int micro_batch) {
    return static_cast<size_t>(stage) * schedule.micro_batches + micro_batch;
  };
  // Bit 0: SEND_F of that slot has run, bit 1: SEND_B.
  std::vector<unsigned char> sent(slot(schedule.stages, 0), 0);
  const auto bit = [](Op send) { return static_cast<unsigned char>(send == Op::kSendForward ? 1 : 2); };
  std::vector<Position> positions(schedule.rank_count());

  // The receive that `rank` stands at, or null.
  const auto receive_at = [&](int rank) -> const Instruction* {
    const auto& list = schedule.ranks[rank];
    const Position& at = positions[rank];
    return at.index < list.size() && is_receive(list[at.index].op) ? &list[at.index] : nullptr;
  };

  std::vector<int> ready;  // a rank stands here at most once: it is put back only when its message comes
  for (int rank = schedule.rank_count() - 1; rank >= 0; --rank) ready.push_back(rank);
  std::vector<bool> queued(schedule.rank_count(), true);

  while (!ready.empty()) {
    const int rank = ready.back();
    ready.pop_back();
    queued[rank] = false;
    const auto& list = schedule.ranks[rank];
    Position& at = positions[rank];
    while (at.index < list.size()) {
      const Instruction& instruction = list[at.index];
      const int micro_batch = instruction.micro_batch + at.offset;
      if (is_receive(instruction.op) &&
          !(sent[slot(sender_stage(instruction), micro_batch)] & bit(sender_op(instruction.op)))) {
        break;
      }
      visit(rank, instruction, micro_batch);
      if (instruction.op == Op::kSendForward || instruction.op == Op::kSendBackward) {
        sent[slot(instruction.stage, micro_batch)] |= bit(instruction.op);
        const int neighbour = instruction.stage + (instruction.op == Op::kSendForward ? 1 : -1);
        const int receiver = schedule.rank_of_stage[neighbour];
        const Instruction* waits = receive_at(receiver);
        if (!queued[receiver] && receiver != rank && waits != nullptr && waits->stage == neighbour &&
            sender_op(waits->op) == instruction.op &&
            waits->micro_batch + positions[receiver].offset == micro_batch) {
          queued[receiver] = true;
          ready.push_back(receiver);
        }
      }
      if (++at.offset == instruction.count) {
        ++at.index;
        at.offset = 0;
      }
    }
  }

  std::vector<size_t> stopped;
  for (const auto& at : positions) stopped.push_back(at.index);
  return stopped;
}

}  // namespace twobp
