// Internal to the auto-scheduler: the earliest begin of every op of an order (head), and the least time from
// its end to the end of the step (tail). Both are kept up to date under moves. The effect of a move can be
// estimated in advance.
#pragma once

#include <utility>
#include <vector>

#include "twobp/plan/auto_schedule/problem.h"

namespace twobp {

class OrderTiming {
 public:
  OrderTiming(const PipelineProblem& problem, TaskOrder order);

  const TaskOrder& order() const { return order_; }
  void reset(TaskOrder order);
  int position(int task) const { return position_[task]; }
  bool fused(int task) const { return fused_[task] != 0; }

  // Computes heads and tails of the whole order. Returns the makespan, or infinity on a deadlock; then
  // nothing else is valid.
  double update();
  double makespan() const { return makespan_; }

  // Moves the op at `from` of the rank to `to`. Call update() afterwards.
  void move(int rank, int from, int to);
  // The first is sufficient for the order to stay free of deadlock. The second is exact for the cap.
  bool stays_acyclic(int rank, int from, int to) const;
  bool stays_within_cap(int rank, int from, int to) const;
  // A lower estimate of the makespan after the move: the longest path through the moved ops.
  double estimate(int rank, int from, int to);

  // One of the longest paths, chosen at random, from its begin.
  void critical_path(SearchRandom& random, std::vector<int>& path) const;

 private:
  double end_of(int task) const { return head_[task] + seconds_[task]; }
  double arrival(int task) const { return sender_[task] < 0 ? 0 : end_of(sender_[task]) + delay_[task]; }
  double after(int task) const {  // time after it on other ranks
    const int to = receiver_[task];
    return to < 0 ? 0 : delay_[to] + seconds_[to] + tail_[to];
  }

  const PipelineProblem& problem_;
  TaskOrder order_;
  std::vector<int> sender_;
  std::vector<int> receiver_;
  std::vector<int> rank_;
  std::vector<double> delay_;  // of the message to this op
  // These depend on which ops are fused.
  std::vector<double> seconds_;
  std::vector<char> fused_;

  std::vector<int> position_;
  std::vector<double> head_;
  std::vector<double> tail_;
  std::vector<double> held_;  // by op: bytes of its rank before it
  double makespan_ = 0;

  std::vector<int> topological_;
  std::vector<char> ran_;
  std::vector<size_t> at_;
  std::vector<int> ready_;
  std::vector<std::pair<int, double>> moved_;  // in an estimate: the moved ops in their new order, with heads
};

}  // namespace twobp
