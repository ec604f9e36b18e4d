// Internal to this folder: the state of a rank in a simulation.
#pragma once

#include <cstddef>
#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/schedule/w_queue.h"

namespace twobp {

// One micro-batch of one stage.
struct Slot {
  int stage = 0;
  int micro_batch = 0;
};

// A message between ranks: seconds on the simulation's clock.
struct Message {
  double sent = 0;
  double arrived = 0;
};

struct RankState {
  double now = 0;
  double cap = 0;
  int in_flight = 0;
  bool trains = false;  // has a backward
  bool splits_p2 = false;
  int before_tail = -1;        // ops before the rest is all W, which then runs in bucket order
  bool ends_by_layer = false;  // the last of these is WTail::last_p1
  bool started = false;        // the first F has begun
  int part = 0;                // of the F or I under way
};

// Whether `op` continues the last entry of the timeline. If so, the two become one.
inline bool prolong_last(std::vector<SimulatedOp>& timeline, const SimulatedOp& op) {
  if (timeline.empty()) return false;
  SimulatedOp& last = timeline.back();
  if (last.op != op.op || last.stage != op.stage || last.micro_batch != op.micro_batch || last.end != op.begin) {
    return false;
  }
  last.end = op.end;
  last.pieces += op.pieces;
  return true;
}

// The number of timeline entries that these instructions make.
inline size_t compute_ops(const std::vector<Instruction>& list) {
  size_t ops = 0;
  for (const Instruction& instruction : list) {
    if (is_compute(instruction.op)) ops += instruction.op == Op::kBackward ? 2 : static_cast<size_t>(instruction.count);
  }
  return ops;
}

inline RankState rank_at_begin(const std::vector<Instruction>& list, P2Order order,
                               const std::vector<bool>& gives_gradient) {
  RankState state;
  for (const Instruction& instruction : list) {
    state.trains |= is_compute(instruction.op) && instruction.op != Op::kForward;
    state.splits_p2 |= instruction.op == Op::kBackwardP1;
  }
  if (order != P2Order::kBucket) return state;
  const WTail tail = w_tail(list, order, gives_gradient);
  state.before_tail = 0;
  for (size_t i = 0; i < tail.begin; ++i) state.before_tail += list[i].count;
  state.ends_by_layer = tail.last_p1 < list.size();
  return state;
}

}  // namespace twobp
