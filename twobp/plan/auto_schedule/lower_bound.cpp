#include <algorithm>
#include <limits>
#include <queue>
#include <utility>

#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/plan/auto_schedule/problem.h"

namespace twobp {
namespace {

class Bound {
 public:
  explicit Bound(const PipelineProblem& problem)
      : problem_(problem), head_(static_cast<size_t>(problem.tasks()), 0), tail_(head_) {
    const std::vector<int> order = in_order();
    for (const int task : order) {
      each_after(task, [&](int next, double delay) {
        head_[next] = std::max(head_[next], head_[task] + seconds(task) + delay);
      });
    }
    for (auto task = order.rbegin(); task != order.rend(); ++task) {
      double& tail = tail_[*task];
      tail = problem.optimizer(problem.rank(*task));
      each_after(*task, [&](int next, double delay) { tail = std::max(tail, delay + seconds(next) + tail_[next]); });
    }
  }

  double critical_path() const {
    double longest = 0;
    for (int task = 0; task < problem_.tasks(); ++task)
      longest = std::max(longest, head_[task] + seconds(task) + tail_[task]);
    return longest;
  }

  // Jackson's preemptive schedule: of the released ops, the one with the longest tail runs.
  double of_rank(int rank) const {
    std::vector<int> tasks;
    for (const int stage : problem_.stages_of_rank(rank)) {
      for (const Op op : kOps) {
        for (int place = 0; place < problem_.units(); ++place) tasks.push_back(problem_.task(op, stage, place));
      }
    }
    std::stable_sort(tasks.begin(), tasks.end(), [&](int a, int b) { return head_[a] < head_[b]; });
    std::priority_queue<std::pair<double, int>> released;  // tail, op
    std::vector<double> left(head_.size());                // seconds
    double now = 0;
    double bound = 0;
    size_t next = 0;
    while (next < tasks.size() || !released.empty()) {
      if (released.empty()) now = std::max(now, head_[tasks[next]]);
      for (; next < tasks.size() && head_[tasks[next]] <= now; ++next) {
        left[tasks[next]] = seconds(tasks[next]);
        released.emplace(tail_[tasks[next]], tasks[next]);
      }
      const auto [tail, task] = released.top();
      const double until = next < tasks.size() ? head_[tasks[next]] : std::numeric_limits<double>::infinity();
      if (now + left[task] <= until) {
        now += left[task];
        bound = std::max(bound, now + tail);
        released.pop();
      } else {
        left[task] -= until - now;
        now = until;
      }
    }
    return bound;
  }

 private:
  static constexpr Op kOps[] = {Op::kForward, Op::kBackwardP1, Op::kBackwardP2};

  double seconds(int task) const { return problem_.seconds(task, false); }

  // All ops, each after those it waits for: of a micro-batch, F of all slices, then their I, then their W.
  std::vector<int> in_order() const {
    std::vector<int> order;
    const int stages = problem_.stages();
    for (int first = 0; first < problem_.units(); first += problem_.slices()) {
      for (const Op op : kOps) {
        for (int place = first; place < first + problem_.slices(); ++place) {
          for (int i = 0; i < stages; ++i)
            order.push_back(problem_.task(op, op == Op::kForward ? i : stages - 1 - i, place));
        }
      }
    }
    return order;
  }

  // Visits the ops that wait for this one, with the time that its message takes.
  template <typename Visit>
  void each_after(int task, Visit&& visit) const {
    const Op op = problem_.op(task);
    const int stage = problem_.stage(task);
    const int place = problem_.place(task);
    if (place + 1 < problem_.units()) visit(task + 1, 0.0);
    if (op == Op::kBackwardP1) visit(problem_.task(Op::kBackwardP2, stage, place), 0.0);
    if (op == Op::kBackwardP2) return;
    const int to = stage + (op == Op::kForward ? 1 : -1);
    if (to >= 0 && to < problem_.stages()) {
      const int next = problem_.task(op, to, place);
      visit(next, problem_.delay_to(next));
    } else if (op == Op::kForward) {  // the first I of a micro-batch is that of its last slice
      const int slices = problem_.slices();
      visit(problem_.task(Op::kBackwardP1, stage, place / slices * slices), 0.0);
    }
  }

  const PipelineProblem& problem_;
  std::vector<double> head_;  // by op: its earliest begin
  std::vector<double> tail_;  // the least time from its end to the end of the step
};

}  // namespace

double lower_bound(const std::vector<int>& rank_of_stage, int micro_batches, const std::vector<StageCost>& costs,
                   const SimulationOptions& options, int slices) {
  const PipelineProblem problem(rank_of_stage, micro_batches, costs, options, slices);
  const Bound bound(problem);
  double seconds = bound.critical_path();
  for (int rank = 0; rank < problem.ranks(); ++rank) seconds = std::max(seconds, bound.of_rank(rank));
  return seconds;
}

}  // namespace twobp
