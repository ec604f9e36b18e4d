// Internal to this folder: the simulation itself, for a schedule and costs that have been checked.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/schedule/simulate/stage_model.h"
#include "twobp/schedule/w_queue.h"

namespace twobp {

// `fills`: whether ranks run W in any wait.
Simulation run_simulation(const Schedule& schedule, const std::vector<StageCost>& costs,
                          const SimulationOptions& options, bool fills);

// Internal to this folder and to plan/: rejects costs and options that make no sense.
// Throws Error that names the stage and the fault in its cost.
void check_stage_cost(const StageCost& cost, int stage);

// Throws Error that names the stage or the option.
void check_simulation_inputs(const Schedule& schedule, const std::vector<StageCost>& costs,
                             const SimulationOptions& options);

// Internal to this folder: attributes waits to causes. See BubbleCause.
// A rank waited from `begin` until `end` for a message sent at `sent`.
struct RankWait {
  double begin = 0;
  double end = 0;
  double sent = 0;
  bool started = false;    // the rank's first F has run
  bool pending = false;    // W was pending
  bool splits_p2 = false;  // the rank's B is split into I and W
};

inline void book_wait(RankSimulation& rank, const RankWait& wait) {
  const IdleCause cause = !wait.started  ? IdleCause::kStartUp
                          : wait.pending ? IdleCause::kMessage
                                         : IdleCause::kNothing;
  rank.idle[static_cast<int>(cause)] += wait.end - wait.begin;
  const double under_way = wait.end - std::clamp(wait.sent, wait.begin, wait.end);
  const BubbleCause before = !wait.started                     ? BubbleCause::kStartUp
                             : wait.pending || !wait.splits_p2 ? BubbleCause::kDependency
                                                               : BubbleCause::kNothing;
  rank.bubble[static_cast<int>(BubbleCause::kCommunication)] += under_way;
  rank.bubble[static_cast<int>(before)] += wait.end - wait.begin - under_way;
}

// Books the rest of the step after each rank's end. `done` is by rank.
void book_tails(Simulation& simulation, const std::vector<double>& done);

// Subtracts the imbalance from the other causes, once all ranks are done.
void book_imbalance(Simulation& simulation);

// Internal to this folder: follows a recorded order of ops along with the schedule.
class RecordedOrder {
 public:
  // Throws Error if the order does not belong to the schedule.
  RecordedOrder(const Schedule& schedule, const std::vector<std::vector<RecordedOp>>& recorded);

  bool empty() const { return recorded_.empty(); }
  // The W that ran next, before any other F or I. Null if there is none.
  const RecordedOp* next_w(int rank) const;
  void take_w(int rank) { ++at_[rank]; }
  // Whether the rank's receives were recorded. If so, W stays before or after them as recorded.
  bool has_receives(int rank) const { return !has_receives_.empty() && has_receives_[rank]; }
  // Takes the receive that the schedule does now. Does nothing if it was not recorded.
  void take_receive(int rank, Op op, int stage, int micro_batch);
  // Takes the F or I that the schedule runs now. Throws Error if another one was recorded.
  void take(int rank, Op op, int stage, int micro_batch);

 private:
  const std::vector<std::vector<RecordedOp>>& recorded_;
  std::vector<size_t> at_;  // by rank
  std::vector<bool> has_receives_;
};

// Internal to this folder: the state of a rank in a simulation.
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
  double link_is_free = 0;     // of its exchanges with replicas: when the last one has left
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

// Internal to this folder: the bytes of every rank and stage during a simulation, and their peaks.
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
