#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/plan/auto_schedule/problem.h"

namespace twobp {
namespace {

constexpr double kMostPairs = 1e9;

// A chain of a rank: all ops of one kind of one stage, in the order of their places.
struct Chain {
  Op op = Op::kForward;
  int stage = 0;
};

// Heads are the earliest starts of all ops. Tails are the least times from their ends to the end of the step.
class Bound {
 public:
  explicit Bound(const PipelineProblem& problem)
      : problem_(problem),
        head_(static_cast<size_t>(problem.tasks()), 0),
        tail_(static_cast<size_t>(problem.tasks()), 0) {
    double pairs = 0;
    for (int rank = 0; rank < problem.ranks(); ++rank) {
      const double ops = 3.0 * static_cast<double>(problem.stages_of_rank(rank).size()) * problem.units();
      pairs += ops * ops;
    }
    few_enough_ = pairs <= kMostPairs;
    for (int stage = 0; stage < problem.stages(); ++stage) {
      p1_before_.push_back(units_before(stage));
      p2_before_.push_back(problem.slices() == 1 ? micro_batches_before(stage) : std::vector<int>(problem.units(), 0));
    }
  }

  struct Longest {
    double seconds = 0;
    int rank = 0;
  };

  // With `sums`, heads and tails count all that the rank itself must run before and after. Else they are
  // those of the longest chain.
  Longest run(bool sums) {
    sums_ = sums && few_enough_;
    const int last = problem_.units() / problem_.slices() - 1;
    for (int m = 0; m <= last; ++m) each_of(m, false, [&](int task) { find_head(task); });
    for (int m = last; m >= 0; --m) each_of(m, true, [&](int task) { find_tail(task); });
    Longest longest;
    for (int task = 0; task < problem_.tasks(); ++task) {
      longest.seconds = std::max(longest.seconds, head_[task] + seconds(task) + tail_[task]);
    }
    if (!sums) return longest;
    std::vector<double> alone;
    left_.resize(static_cast<size_t>(problem_.tasks()));
    for (int rank = 0; rank < problem_.ranks(); ++rank) alone.push_back(one_machine(rank));
    longest.seconds = std::max(longest.seconds, *std::max_element(alone.begin(), alone.end()));
    // An op's tail includes the work of later ranks, so several ranks may reach the bound.
    double most = -1;
    for (int rank = 0; rank < problem_.ranks(); ++rank) {
      if (alone[rank] >= longest.seconds * (1 - 1e-12) && work(rank) > most) {
        most = work(rank);
        longest.rank = rank;
      }
    }
    return longest;
  }

 private:
  double seconds(int task) const { return problem_.seconds(task, false); }

  double work(int rank) const {
    double sum = problem_.optimizer(rank);
    each_chain(rank, [&](const Chain& chain) {
      for (int place = 0; place < problem_.units(); ++place)
        sum += seconds(problem_.task(chain.op, chain.stage, place));
    });
    return sum;
  }

  // Visits the ops of one micro-batch, each after those it waits for; if `backwards`, in the opposite order.
  template <typename Visit>
  void each_of(int m, bool backwards, Visit&& visit) const {
    const int stages = problem_.stages();
    const int slices = problem_.slices();
    const int all = 3 * stages * slices;
    for (int i = 0; i < all; ++i) {
      const int at = backwards ? all - 1 - i : i;
      const int place = m * slices + at / stages % slices;
      const int stage = at % stages;
      const Op op = static_cast<Op>(at / (stages * slices));
      visit(problem_.task(op, op == Op::kForward ? stage : stages - 1 - stage, place));
    }
  }

  // By unit: how many places of the stage must have finished I before F of the unit fits under the cap.
  // Between F and I a unit holds its activations in this stage and at least those of the rank's earlier
  // stages.
  std::vector<int> units_before(int stage) const {
    std::vector<int> counts(problem_.units(), 0);
    const int rank = problem_.rank_of_stage()[stage];
    const double cap = room(rank);
    if (!std::isfinite(cap)) return counts;
    std::vector<double> held;  // of each slice
    for (int slice = 0; slice < problem_.slices(); ++slice) {
      held.push_back(0);
      for (const int other : problem_.stages_of_rank(rank)) {
        if (other <= stage) held.back() += problem_.cost(other, slice).activation_bytes;
      }
    }
    if (problem_.slices() == 1) {
      for (int m = 0; m < problem_.units() && held[0] > 0; ++m) counts[m] = whole(m + 1 - cap / held[0], m);
      return counts;
    }
    double bytes = 0;
    int freed = 0;
    for (int unit = 0; unit < problem_.units(); ++unit) {
      bytes += held[unit % problem_.slices()];
      while (freed < unit && bytes > cap * (1 + 1e-9))
        bytes -= held[problem_.unit_at(Op::kBackwardP1, freed++) % problem_.slices()];
      counts[unit] = freed;
    }
    return counts;
  }
  // By micro-batch: the same with W. Between I and W a micro-batch holds its stash.
  std::vector<int> micro_batches_before(int stage) const {
    std::vector<int> counts(problem_.units(), 0);
    const StageCost& cost = problem_.cost(stage, 0);
    const double cap = room(problem_.rank_of_stage()[stage]);
    // W that makes room between the layers of F could as well run right before F, which would end no later.
    if (cost.stash_bytes <= 0 || cost.activation_bytes <= 0 || !std::isfinite(cap)) return counts;
    for (int m = 0; m < problem_.units(); ++m) {
      // After w W and i I, (m + 1 - i) activations and (i - w) stashes are held. This is linear in i.
      const double none_stashed = m + 1 - cap / cost.activation_bytes;
      const double all_stashed = m - (cap - cost.activation_bytes) / cost.stash_bytes;
      const int count = whole(std::min(none_stashed, all_stashed), m);
      // The last one may have freed a part of its stash.
      counts[m] = cost.p2_units > 1 ? std::max(0, count - 1) : count;
    }
    return counts;
  }
  // The cap, plus bytes that may be freed without being counted here.
  double room(int rank) const {
    double bytes = problem_.cap(rank);
    for (const int stage : problem_.stages_of_rank(rank)) {
      for (int unit = 0; unit < problem_.units(); ++unit) bytes += problem_.stage_bytes_of(stage, unit).deficit;
    }
    return bytes;
  }
  static int whole(double count, int most) { return std::clamp(static_cast<int>(std::ceil(count - 1e-6)), 0, most); }

  // The number of ops at the front of a chain on the rank of `task` that run before `task` in every schedule.
  int before(int task, const Chain& chain) const {
    int count = prefix(task, chain);
    if (problem_.op(task) == Op::kForward) {
      const int stage = problem_.stage(task);
      const int unit = problem_.place(task);
      if (const int p1 = p1_before_[stage][unit]; p1 > 0) {
        count = std::max(count, with_itself(problem_.task(Op::kBackwardP1, stage, p1 - 1), chain));
      }
      if (const int p2 = p2_before_[stage][unit]; p2 > 0) {
        count = std::max(count, with_itself(problem_.task(Op::kBackwardP2, stage, p2 - 1), chain));
      }
    }
    return count;
  }
  int prefix(int task, const Chain& chain) const {
    // Of another kind than the op, F of all slices count.
    const int place = last_of(task, chain.op == Op::kForward && problem_.op(task) != Op::kForward);
    if (problem_.precedes(problem_.task(chain.op, chain.stage, place), task, false)) return place + 1;
    return place > 0 && problem_.precedes(problem_.task(chain.op, chain.stage, place - 1), task, false) ? place : 0;
  }
  int with_itself(int task, const Chain& chain) const {
    if (chain.op == problem_.op(task) && chain.stage == problem_.stage(task)) return problem_.place(task) + 1;
    return prefix(task, chain);
  }
  // The place of the op, or the last one of its micro-batch.
  int last_of(int task, bool of_micro_batch) const {
    return of_micro_batch ? (problem_.micro_batch(task) + 1) * problem_.slices() - 1 : problem_.place(task);
  }
  // The same for the other end: the first place of the chain that runs after `task`.
  int after(int task, const Chain& chain) const {
    const int place = problem_.place(task);
    int first = suffix(task, chain);
    if (problem_.op(task) != Op::kForward && problem_.capped(problem_.rank(task))) {
      const int stage = problem_.stage(task);
      const bool p1 = problem_.op(task) == Op::kBackwardP1;
      // Finds the first unit whose F waits for this one.
      const std::vector<int>& counts = (p1 ? p1_before_ : p2_before_)[stage];
      const auto waits = std::find_if(counts.begin(), counts.end(), [&](int count) { return count > place; });
      if (waits != counts.end()) {
        const int later = static_cast<int>(waits - counts.begin());
        const bool itself = chain.op == Op::kForward && chain.stage == stage;
        first = std::min(first, itself ? later : suffix(problem_.task(Op::kForward, stage, later), chain));
      }
    }
    return first;
  }
  int suffix(int task, const Chain& chain) const {
    const bool turns = problem_.op(task) == Op::kForward && chain.op != Op::kForward;
    const int place = turns ? problem_.micro_batch(task) * problem_.slices() : problem_.place(task);
    if (problem_.precedes(task, problem_.task(chain.op, chain.stage, place), false)) return place;
    const int all = problem_.units();
    const bool next =
        place + 1 < all && problem_.precedes(task, problem_.task(chain.op, chain.stage, place + 1), false);
    return next ? place + 1 : all;
  }

  template <typename Visit>
  void each_chain(int rank, Visit&& visit) const {
    for (const int stage : problem_.stages_of_rank(rank)) {
      for (const Op op : {Op::kForward, Op::kBackwardP1, Op::kBackwardP2}) visit(Chain{op, stage});
    }
  }

  // Schedules the rank alone, with the ops that run before `task`, from their heads on. It ends no sooner
  // than this.
  void find_head(int task) {
    double head = 0;
    if (const int from = problem_.sender(task); from >= 0) {
      head = head_[from] + seconds(from) + problem_.delay_to(task);
    }
    chains_.clear();
    each_chain(problem_.rank(task), [&](const Chain& chain) {
      const int count = before(task, chain);
      if (count == 0) return;
      const int first = problem_.task(chain.op, chain.stage, 0);
      head = std::max(head, head_[first + count - 1] + seconds(first + count - 1));
      chains_.push_back({first, first + count, 1});
    });
    head_[task] = sums_ ? std::max(head, merged(head_)) : head;
  }
  void find_tail(int task) {
    double tail = problem_.optimizer(problem_.rank(task));
    if (const int to = problem_.receiver(task); to >= 0) {
      tail = std::max(tail, problem_.delay_to(to) + seconds(to) + tail_[to]);
    }
    chains_.clear();
    each_chain(problem_.rank(task), [&](const Chain& chain) {
      const int first = after(task, chain);
      if (first == problem_.units()) return;
      const int id = problem_.task(chain.op, chain.stage, first);
      tail = std::max(tail, tail_[id] + seconds(id));
      chains_.push_back({problem_.task(chain.op, chain.stage, problem_.units() - 1), id - 1, -1});
    });
    tail_[task] = sums_ ? std::max(tail, merged(tail_)) : tail;
  }

  // Runs the ops of chains_ one after the other, by their release times.
  double merged(const std::vector<double>& release) {
    double now = 0;
    while (true) {
      Run* next = nullptr;
      for (Run& run : chains_) {
        if (run.at != run.end && (next == nullptr || release[run.at] < release[next->at])) next = &run;
      }
      if (next == nullptr) return now;
      now = std::max(now, release[next->at]) + seconds(next->at);
      next->at += next->step;
    }
  }

  // Jackson's preemptive schedule: of the released ops, the one with the longest tail runs.
  double one_machine(int rank) {
    std::vector<int> tasks;
    each_chain(rank, [&](const Chain& chain) {
      for (int place = 0; place < problem_.units(); ++place)
        tasks.push_back(problem_.task(chain.op, chain.stage, place));
    });
    std::stable_sort(tasks.begin(), tasks.end(), [&](int a, int b) { return head_[a] < head_[b]; });
    std::priority_queue<std::pair<double, int>> released;  // tail, op
    double now = 0;
    double bound = 0;
    size_t next = 0;
    while (next < tasks.size() || !released.empty()) {
      if (released.empty()) now = std::max(now, head_[tasks[next]]);
      for (; next < tasks.size() && head_[tasks[next]] <= now; ++next) {
        left_[tasks[next]] = seconds(tasks[next]);
        released.emplace(tail_[tasks[next]], tasks[next]);
      }
      const auto [tail, task] = released.top();
      const double until = next < tasks.size() ? head_[tasks[next]] : std::numeric_limits<double>::infinity();
      if (now + left_[task] <= until) {
        now += left_[task];
        bound = std::max(bound, now + tail);
        released.pop();
      } else {
        left_[task] -= until - now;
        now = until;
      }
    }
    return bound;
  }

  struct Run {
    int at = 0;
    int end = 0;
    int step = 1;
  };

  const PipelineProblem& problem_;
  bool few_enough_ = true;
  bool sums_ = true;
  std::vector<double> head_;
  std::vector<double> tail_;
  std::vector<Run> chains_;
  std::vector<std::vector<int>> p1_before_;  // by stage and unit
  std::vector<std::vector<int>> p2_before_;
  std::vector<double> left_;  // by op on its rank: remaining seconds
};

}  // namespace

LowerBound lower_bound(const std::vector<int>& rank_of_stage, int micro_batches, const std::vector<StageCost>& costs,
                       const SimulationOptions& options, int slices) {
  const PipelineProblem problem(rank_of_stage, micro_batches, costs, options, slices);
  LowerBound bound;
  Bound search(problem);
  bound.critical_path = search.run(false).seconds;
  const auto longest = search.run(true);
  bound.seconds = std::max(longest.seconds, bound.critical_path);
  bound.rank = bound.seconds > bound.critical_path * (1 + 1e-12) ? longest.rank : -1;
  return bound;
}

}  // namespace twobp
