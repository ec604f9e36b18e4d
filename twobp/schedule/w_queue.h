// The pending W of one rank, and the rules for which of it runs next. A rank asks its queue at every wait, and so does
// the simulation: both run W in one order.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// Units of W of one stage and micro-batch that follow each other. A stage's units are counted in the order in which I
// makes them, from the last layer on.
struct WUnits {
  int stage = 0;
  int micro_batch = 0;
  int first = 0;
  int count = 1;
};

class WQueue {
 public:
  struct Rules {
    P2Order order = P2Order::kOldest;
    // Waits prefer W that completes gradients, whose sums over replicas can then begin (with P2Order::kBucket).
    bool completes_first = false;
    // By instruction: the units that have run before it, at receives (simulate/for_training.h). Null: no places.
    const std::vector<int>* places = nullptr;
    // By stage: whether its gradients are streamed. Its W is held back until all its I has ended, and then runs unit
    // by unit, each with all micro-batches, so that each gradient is complete soon after it has begun. Empty: none.
    std::vector<bool> streams{};
  };

  WQueue() = default;
  // For one step of a rank.
  WQueue(const Schedule& schedule, int rank, const Rules& rules);

  // I of a micro-batch begins, has made more units of W, and has ended. B runs its units itself and adds none.
  void begin_p1(int stage, int micro_batch);
  void add(int units);
  void end_p1();

  bool has_begun(int stage, int micro_batch) const { return find(stage, micro_batch) != nullptr; }
  // Whether I of all micro-batches of this stage has ended.
  bool all_ended(int stage) const { return ended_[local(stage)] == micro_batches_; }
  // Whether no W may run.
  bool empty() const { return pending_ == held_back_; }
  // Units that have run.
  int ran() const { return ran_; }
  int ran(int stage, int micro_batch) const;
  // Units of this micro-batch that have not run; 0 before its I.
  int left(int stage, int micro_batch) const;

  // Each of these takes what runs next. None: nothing that it asks for is pending.
  // The oldest unit: to make room.
  std::optional<WUnits> take_oldest();
  // During a wait.
  std::optional<WUnits> take_filling();
  // At this instruction, by the places.
  std::optional<WUnits> take_placed(size_t instruction);
  // All that is left of this micro-batch, unless its stage streams.
  std::optional<WUnits> take_rest(int stage, int micro_batch);
  // The next unit of this micro-batch, likewise.
  std::optional<WUnits> take_next(int stage, int micro_batch);
  // The same unit of other micro-batches in [first, last), if it is their next one: to run them together.
  std::vector<WUnits> take_same(const WUnits& unit, int first, int last);
  // Layer by layer: takes the units of the rank's stages after `stage`, and of `stage` the first `units` of each
  // micro-batch. The last layer comes first, with all its micro-batches. Calls run(WUnits) for each.
  template <typename Run>
  void take_by_layer(int stage, int units, const Run& run);

 private:
  struct Slot {
    int stage = 0;
    int micro_batch = 0;
    int made = 0;
    int ran = 0;
  };

  size_t local(int stage) const;
  const Slot* find(int stage, int micro_batch) const;
  WUnits take(Slot& slot, int count = 1);
  std::optional<WUnits> take_of_ended_stage();
  bool streams(int stage) const { return !rules_.streams.empty() && rules_.streams[static_cast<size_t>(stage)]; }
  bool held_back(int stage) const { return streams(stage) && ended_[local(stage)] < micro_batches_; }

  std::vector<int> stages_;  // of the rank, ascending
  int micro_batches_ = 0;
  Rules rules_;
  std::vector<Slot> slots_;  // in the order of their I
  std::vector<int> index_;   // of slots_, by stage and micro-batch; -1: no I yet
  std::vector<int> ended_;   // by stage: micro-batches whose I has ended
  size_t head_ = 0;          // earlier slots are done
  bool open_ = false;        // the last slot's I is under way
  int pending_ = 0;
  int streamed_ = 0;   // of these: of stages that stream
  int held_back_ = 0;  // of these: whose I has not ended
  int ran_ = 0;
};

// Sums of the same costs in another order differ in the last digits. This must not cause another unit of W to run.
inline bool exceeds(double a, double b) {
  return a > b + 1e-9 * std::abs(b);
}
// Whether old W must run before an op that needs these bytes beside those that are held. A cap of 0 is none. An op that
// needs nothing runs, also above the cap.
inline bool lacks_room(double held, double need, double cap) {
  return cap > 0 && need > 0 && exceeds(held + need, cap);
}

// Whether an F or I that waits for tokens of experts lets the F after it run until that waits, too (StepLoop::Turns).
// Not in a pipeline, whose other ranks wait for the first of the two: its step would not become shorter.
bool takes_turns(const Schedule& schedule, bool fills_waits);
// Whether the instruction after `lead` may do so: it is F of one micro-batch, and does not need its result.
bool may_turn(const Instruction& lead, const Instruction& next);

// Where the rest of a rank's list is all W.
struct WTail {
  size_t begin = 0;  // an index into the list
  // With P2Order::kBucket: the I right before it if no rank waits for its dL/dx, so that its W runs within it, layer by
  // layer. Else past the end of the list.
  size_t last_p1 = 0;
};
// `gives_gradient`, by stage: whether another stage waits for its dL/dx.
WTail w_tail(const std::vector<Instruction>& list, P2Order order, const std::vector<bool>& gives_gradient);

template <typename Run>
void WQueue::take_by_layer(int stage, int units, const Run& run) {
  for (size_t s = stages_.size(); s-- > 0 && stages_[s] >= stage;) {
    for (int unit = 0;; ++unit) {
      if (stages_[s] == stage && unit >= units) break;
      bool more = false;
      for (Slot& slot : slots_) {
        if (slot.stage != stages_[s]) continue;
        more |= slot.made > unit;
        if (slot.ran == unit && slot.made > unit) run(take(slot));
      }
      if (!more) break;
    }
  }
}

}  // namespace twobp
