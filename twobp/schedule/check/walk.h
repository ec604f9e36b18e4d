// Internal to check/ and simulate/: runs all ranks of a schedule side by side, in time proportional to the
// instructions.
#pragma once

#include <cstddef>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// The message that a receive waits for, as its sender writes it: 2RECV_F5 waits for 1SEND_F5.
inline Op sender_op(Op receive) {
  return receive == Op::kRecvForward ? Op::kSendForward : Op::kSendBackward;
}
inline int sender_stage(const Instruction& receive) {
  return receive.op == Op::kRecvForward ? receive.stage - 1 : receive.stage + 1;
}
inline bool is_send(Op op) {
  return op == Op::kSendForward || op == Op::kSendBackward;
}

// The receive of a send, or the send of a receive: 1SEND_F5 and 2RECV_F5 are the two sides of one message.
inline Instruction other_side(const Instruction& message) {
  switch (message.op) {
    case Op::kSendForward:
      return {Op::kRecvForward, message.stage + 1, message.micro_batch, message.count};
    case Op::kSendBackward:
      return {Op::kRecvBackward, message.stage - 1, message.micro_batch, message.count};
    default:
      return {sender_op(message.op), sender_stage(message), message.micro_batch, message.count};
  }
}

// The messages from one rank to another in the order in which they are sent: the receive of each, and the index of its
// send in the sender's list.
inline std::vector<std::pair<Instruction, size_t>> messages_between(const Schedule& schedule, int from, int to) {
  std::vector<std::pair<Instruction, size_t>> messages;
  const std::vector<Instruction>& list = schedule.ranks[from];
  for (size_t i = 0; i < list.size(); ++i) {
    if (!is_send(list[i].op)) continue;
    const Instruction receive = other_side(list[i]);
    if (schedule.rank_of_stage[receive.stage] != to) continue;
    for (int mb = receive.micro_batch; mb < receive.micro_batch + receive.count; ++mb)
      messages.emplace_back(Instruction{receive.op, receive.stage, mb}, i);
  }
  return messages;
}

// The position of a rank in its list.
struct ListCursor {
  size_t index = 0;
  int offset = 0;  // within the instruction's range

  bool done(const std::vector<Instruction>& list) const { return index == list.size(); }
  const Instruction& at(const std::vector<Instruction>& list) const { return list[index]; }
  int micro_batch(const std::vector<Instruction>& list) const { return list[index].micro_batch + offset; }
  void go_on(const std::vector<Instruction>& list) {
    if (++offset < list[index].count) return;
    ++index;
    offset = 0;
  }
};

inline std::vector<size_t> indices_of(const std::vector<ListCursor>& cursors) {
  std::vector<size_t> indices;
  for (const ListCursor& at : cursors) indices.push_back(at.index);
  return indices;
}

// The positions of all ranks. A receive goes on only after its send. Stages, micro-batches and placement must
// be in range.
class RankWalk {
 public:
  explicit RankWalk(const Schedule& schedule)
      : schedule_(schedule),
        sent_(static_cast<size_t>(schedule.stages) * schedule.micro_batches, 0),
        positions_(schedule.ranks.size()) {}

  bool done(int rank) const { return positions_[rank].done(schedule_.ranks[rank]); }
  // An index into the rank's list.
  size_t index(int rank) const { return positions_[rank].index; }
  const Instruction& at(int rank) const { return positions_[rank].at(schedule_.ranks[rank]); }
  int micro_batch(int rank) const { return positions_[rank].micro_batch(schedule_.ranks[rank]); }
  bool can_go(int rank) const {
    if (done(rank)) return false;
    const Instruction& next = at(rank);
    return !is_receive(next.op) || (sent_[slot(sender_stage(next), micro_batch(rank))] & bit(sender_op(next.op))) != 0;
  }

  // Visits (rank, instruction, micro_batch) at the rank's position and moves the rank on by one. Returns the
  // rank that waited for this message, or -1.
  template <typename Visit>
  int advance(int rank, Visit&& visit) {
    const Instruction& instruction = at(rank);
    const int micro_batch = this->micro_batch(rank);
    visit(rank, instruction, micro_batch);
    int woken = -1;
    if (is_send(instruction.op)) {
      sent_[slot(instruction.stage, micro_batch)] |= bit(instruction.op);
      const int neighbour = instruction.stage + (instruction.op == Op::kSendForward ? 1 : -1);
      const int receiver = schedule_.rank_of_stage[neighbour];
      if (receiver != rank && !done(receiver)) {
        const Instruction& waits = at(receiver);
        if (is_receive(waits.op) && waits.stage == neighbour && sender_op(waits.op) == instruction.op &&
            this->micro_batch(receiver) == micro_batch) {
          woken = receiver;
        }
      }
    }
    positions_[rank].go_on(schedule_.ranks[rank]);
    return woken;
  }

  std::vector<size_t> indices() const { return indices_of(positions_); }

 private:
  size_t slot(int stage, int micro_batch) const {
    return static_cast<size_t>(stage) * schedule_.micro_batches + micro_batch;
  }
  static unsigned char bit(Op send) { return send == Op::kSendForward ? 1 : 2; }

  const Schedule& schedule_;
  std::vector<unsigned char> sent_;  // per slot; bit 0: its SEND_F has run, bit 1: SEND_B
  std::vector<ListCursor> positions_;
};

// Calls visit(rank, instruction, micro_batch) for every micro-batch of every instruction. A rank's calls are
// in order, and each rank goes as far as it can. Returns where each rank stopped: an index into its list, or
// the list's size if the rank ran to the end. Anything less is a deadlock.
template <typename Visit>
std::vector<size_t> walk(const Schedule& schedule, Visit&& visit) {
  RankWalk ranks(schedule);
  std::vector<int> ready;  // a rank is in it at most once: it comes back only when its message does
  for (int rank = schedule.rank_count() - 1; rank >= 0; --rank) ready.push_back(rank);
  std::vector<bool> queued(schedule.ranks.size(), true);
  while (!ready.empty()) {
    const int rank = ready.back();
    ready.pop_back();
    queued[rank] = false;
    while (ranks.can_go(rank)) {
      const int woken = ranks.advance(rank, visit);
      if (woken < 0 || queued[woken]) continue;
      queued[woken] = true;
      ready.push_back(woken);
    }
  }
  return ranks.indices();
}

// The same in the order of time: an instruction is visited only if no other rank that can go on would do so
// earlier. clock(rank, instruction, micro_batch) is the time when the rank would visit its next instruction.
// fill(rank, instruction, micro_batch) is called at that time. It does what the rank does first, and returns
// whether this took time: other ranks may then be earlier.
template <typename Visit, typename Clock, typename Fill>
std::vector<size_t> walk_in_time(const Schedule& schedule, Visit&& visit, Clock&& clock, Fill&& fill) {
  RankWalk ranks(schedule);
  using Entry = std::pair<double, int>;  // for equal times, the lower rank comes first
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
  const auto queue = [&](int rank) { ready.emplace(clock(rank, ranks.at(rank), ranks.micro_batch(rank)), rank); };
  std::vector<bool> queued(schedule.ranks.size(), false);
  for (int rank = 0; rank < schedule.rank_count(); ++rank) {
    if (!ranks.can_go(rank)) continue;
    queued[rank] = true;
    queue(rank);
  }
  while (!ready.empty()) {
    const int rank = ready.top().second;
    ready.pop();
    queued[rank] = false;
    while (ranks.can_go(rank)) {
      const Entry next{clock(rank, ranks.at(rank), ranks.micro_batch(rank)), rank};
      if (!ready.empty() && ready.top() < next) {
        queued[rank] = true;
        ready.push(next);
        break;
      }
      if (fill(rank, ranks.at(rank), ranks.micro_batch(rank))) continue;
      const int woken = ranks.advance(rank, visit);
      if (woken < 0 || queued[woken]) continue;
      queued[woken] = true;
      queue(woken);
    }
  }
  return ranks.indices();
}

// The beginning of a step in which only F runs. It can be run again, because it adds to no gradient and computes no
// loss.
struct LeadingForwards {
  std::vector<size_t> end;  // by rank: the first instruction after them
  // By rank: the receives after `end` whose messages other ranks send before their own `end`.
  std::vector<std::vector<Instruction>> unreceived;
};

// The leading forwards are F of all stages but the last one (of each copy of the model) and their messages. They extend
// in every rank's list as far as all ranks get with these alone, so none of them waits for an I.
LeadingForwards leading_forwards(const Schedule& schedule);

}  // namespace twobp
