// Internal to the auto-scheduler: a pipeline as a shop-scheduling problem of ranks ("machines") and units
// ("jobs"): micro-batches, or their slices. Its solution is an order of the ops on every rank. An op is a
// number: (F, I or W; stage; place). Its place is the number of ops of the same kind and stage before it, in
// every schedule. That is the unit's own number for F; I and W run the slices of a micro-batch last to first
// (Schedule::backward_order). Without slices, place and unit are the micro-batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// The order of the ops on each rank. A fused backward (B) is its I with `fused` set; its W is in no list.
struct TaskOrder {
  std::vector<std::vector<int>> ranks;
  std::vector<char> fused;  // by stage and place
};

class PipelineProblem {
 public:
  // `costs` in rows of one entry for each stage: one row, one for each slice, or one for each slice of each
  // micro-batch. All micro-batches take the same bytes. Throws Error if `simulate` would reject placement,
  // costs or caps, or if a cap is below least_activation_bytes.
  PipelineProblem(std::vector<int> rank_of_stage, int micro_batches, std::vector<StageCost> costs,
                  const SimulationOptions& options, int slices = 1);

  int ranks() const { return static_cast<int>(stages_of_rank_.size()); }
  int stages() const { return static_cast<int>(rank_of_stage_.size()); }
  int slices() const { return slices_; }
  int units() const { return units_; }  // micro-batches times slices
  int tasks() const { return 3 * stages() * units_; }

  // `op`: F, I or W, the first three of Op.
  int task(Op op, int stage, int place) const { return (static_cast<int>(op) * stages() + stage) * units_ + place; }
  Op op(int task) const { return static_cast<Op>(task / (stages() * units_)); }
  int stage(int task) const { return task / units_ % stages(); }
  int place(int task) const { return task % units_; }
  int micro_batch(int task) const { return place(task) / slices_; }
  int unit(int task) const { return unit_at(op(task), place(task)); }
  // The unit whose op is in this place; or the place of a unit.
  int unit_at(Op op, int place) const {
    return op == Op::kForward ? place : place / slices_ * slices_ + slices_ - 1 - place % slices_;
  }
  int slot(int task) const { return task % (stages() * units_); }  // of TaskOrder::fused
  int rank(int task) const { return rank_of_stage_[stage(task)]; }

  const std::vector<int>& rank_of_stage() const { return rank_of_stage_; }
  const std::vector<int>& stages_of_rank(int rank) const { return stages_of_rank_[rank]; }  // rising
  // The cost of a unit in the stage, with its `layers` folded into the stage's own numbers.
  const StageCost& cost(int stage, int unit) const { return costs_[index(stage, unit)]; }
  const StageBytes& stage_bytes_of(int stage, int unit) const { return bytes_[index(stage, unit)]; }
  double optimizer(int rank) const { return optimizer_[rank]; }
  // Infinite if there is no cap. Slightly above the given cap, because sums of the same bytes differ in the
  // last digits.
  double cap(int rank) const { return cap_[rank]; }
  bool capped(int rank) const { return cap_[rank] < std::numeric_limits<double>::infinity(); }

  double seconds(int task, bool fused) const;
  // The mean of all units, without fusing.
  double mean_seconds(Op op, int stage) const { return mean_seconds_[static_cast<int>(op) * stages() + stage]; }
  // The bytes that the op adds to its rank (or frees), and the most that it adds while it runs.
  double bytes(int task, bool fused) const;
  double peak(int task, bool fused) const;

  // The op on another rank that sends a message to this one or receives one from it, or -1; and the message's
  // duration. Links are assumed to be free: only the simulation knows the waits there.
  int sender(int task) const;
  int receiver(int task) const;
  double delay_to(int task) const {  // of the message to `task`; 0 if there is none
    return task < 2 * stages() * units_ ? delay_[at_op(task)] : 0;
  }

  // For two ops of one rank: whether `a` comes before `b` in every schedule, whatever else is fused. A fused
  // `b` also comes after the W in earlier places.
  bool precedes(int a, int b, bool b_fused) const;

  // Whether every rank's order fits its cap, op by op.
  bool fits(const TaskOrder& order) const;

  // The order as a schedule named "auto" that is ready to run.
  Schedule to_schedule(const TaskOrder& order, P2Policy policy) const;
  // The order in which a simulation ran. W is where its last piece ran. `ranks` is empty if the simulation
  // broke the order of units.
  TaskOrder from_simulation(const Simulation& simulation) const;

 private:
  void set_delays(const SimulationOptions& options);
  // The index of a unit's cost in costs_.
  size_t index(int stage, int unit) const { return static_cast<size_t>(unit % rows_) * stages() + stage; }
  // The index of a task in lists with an entry for each op and cost.
  size_t at_op(int task) const {
    return static_cast<size_t>(op(task)) * costs_.size() + index(stage(task), unit(task));
  }

  std::vector<int> rank_of_stage_;
  int slices_;
  int units_;
  int rows_;  // of costs_
  std::vector<StageCost> costs_;
  std::vector<double> mean_seconds_;  // by op and stage
  std::vector<StageBytes> bytes_;
  std::vector<double> delay_;  // by op (F, I) and cost
  std::vector<double> peak_;   // by op and cost
  std::vector<std::vector<int>> stages_of_rank_;
  std::vector<double> optimizer_;
  std::vector<double> cap_;
};

// Internal to the auto-scheduler: random numbers that are the same on every platform. (The distributions of
// the standard library are not.)
class SearchRandom {
 public:
  explicit SearchRandom(uint64_t seed) : engine_(seed) {}

  uint64_t next() { return engine_(); }
  size_t below(size_t count) { return static_cast<size_t>(engine_() % count); }
  double unit() { return static_cast<double>(engine_() >> 11U) * 0x1p-53; }  // [0, 1)

 private:
  std::mt19937_64 engine_;
};

// Internal to the auto-scheduler: local search. It is a tabu search over the orders of the ranks, as in
// job-shop scheduling. Only moves of an op to the edge of its block on a critical path can shorten the step
// (Nowicki and Smutnicki, "A fast taboo search algorithm for the job shop problem", Management Science 42,
// 1996; moves across the block: Balas and Vazacopoulos, Management Science 44, 1998). Moves keep micro-batch
// order, caps and acyclicity.
struct SearchResult {
  TaskOrder order;
  double seconds = 0;
  long iterations = 0;
};

// The step time of an order. Infinite if the order deadlocks.
double order_seconds(const PipelineProblem& problem, const TaskOrder& order);

// Makes up to `iterations` moves from `start`, which must fit. Ends early at `good_enough` seconds. The
// result is never worse than `start`, and the same for the same seed.
SearchResult improve_order(const PipelineProblem& problem, TaskOrder start, long iterations, double good_enough,
                           uint64_t seed);

// Internal to the auto-scheduler: list scheduling. As soon as a rank is free, it takes the ready op that a
// rule prefers. Many rules are tried. A look ahead decides whether a W fits before the next message, and
// whether a micro-batch may begin: under a cap, only if those under way can all still be finished.
struct GreedyRule {
  enum class Prefer : uint8_t { kBackward, kForward, kLongestTail };
  Prefer prefer = Prefer::kBackward;
  bool deepest_forward = true;  // with F of several stages ready: the one nearest to the end
  // The most micro-batches that a rank has begun (from F of its first stage to I of it). The limit is this
  // factor times the duration of the way there and back, in rounds of the busiest rank; 0: no limit.
  double in_flight = 1;
  // The same, from F to W.
  double unfinished = 0;
  // W starts in a wait if at least this part of it fits; 0: always.
  double w_fits = 0;
  double noise = 0;  // added to the preference, as a fraction of the tail
  double fuse = 0;   // how often a backward with a stash bigger than its activations is fused under a cap
  uint64_t seed = 0;
};

// `count` rules to try, the most promising first. After some fixed rules, the others are drawn with `seed`.
std::vector<GreedyRule> greedy_rules(int count, uint64_t seed);

// Finds an order that fits. Returns no ranks if there is no room for its next op, which happens under caps
// near the least if the bytes of layers do not add up to zero over F, I and W.
TaskOrder greedy_order(const PipelineProblem& problem, const GreedyRule& rule);

}  // namespace twobp
