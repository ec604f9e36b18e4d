// The optimal split for a V: rank 0 has the first and the last stage, rank 1 the stages next to them, and so on. So the
// layers of the first ranks are a number of layers at either end. Dynamic programming over these two numbers runs once
// for each aim: first the worst rank, then the slowest stage under that limit, then the sum of squares under both.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "twobp/core/text.h"
#include "twobp/plan/partition/problem.h"

namespace twobp {
namespace {

// The same sum computed in two ways may differ in the last digits.
double loosened(double limit) {
  return limit * (1 + 1e-12);
}

class VSplit {
 public:
  VSplit(const PartitionProblem& problem, PartitionGoal goal)
      : problem_(problem), goal_(goal), layers_(problem.layers()), ranks_(problem.ranks()) {}

  std::vector<int> solve(double bound) {
    rank_limit_ = bound;
    const double worst = run(Aim::kRank);
    if (worst == kInfinity) return {};
    rank_limit_ = worst;
    stage_limit_ = run(Aim::kStage);
    run(Aim::kSquares);
    return split();
  }

 private:
  enum class Aim { kRank, kStage, kSquares };

  struct Taken {
    int16_t front = 0;  // layers that the last rank took at either end to reach this state
    int16_t back = 0;
  };

  size_t at(int front, int back) const { return static_cast<size_t>(front) * (layers_ + 1) + back; }

  double run(Aim aim) {
    aim_ = aim;
    const size_t states = at(layers_, layers_) + 1;
    taken_.resize(ranks_ + 1, std::vector<Taken>(states));
    next_.assign(states, kInfinity);
    next_[0] = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      std::swap(now_, next_);
      next_.assign(states, kInfinity);
      for (int front = rank; front <= layers_; ++front) {
        for (int back = rank; front + back + 2 * (ranks_ - rank) <= layers_; ++back) {
          if (now_[at(front, back)] < kInfinity) take(rank, front, back);
        }
      }
    }
    best_ = kInfinity;
    for (int front = ranks_; front <= layers_ - ranks_; ++front) {
      const double value = next_[at(front, layers_ - front)];
      if (value < best_) best_ = value, best_front_ = front;
    }
    return best_;
  }

  // Tries all ways for `rank` to take layers after the first `front` and before the last `back`.
  void take(int rank, int front, int back) {
    const int end = layers_ - back;
    const int left = 2 * (ranks_ - rank - 1);  // the least number of layers for the other ranks
    const double base = now_[at(front, back)];
    const int up = problem_.stages() - 1 - rank;  // the stage at the back
    for (int a = 1; front + a + 1 + left <= end; ++a) {
      const int middle = front + a;
      const double first = problem_.goal(goal_, rank, front, middle);
      if (first > loosened(rank_limit_) || first > loosened(stage_limit_)) break;
      // The last rank takes all remaining layers.
      for (int b = left > 0 ? 1 : end - middle; middle + left <= end - b; ++b) {
        const double second = problem_.goal(goal_, up, end - b, end);
        const double both = first + second;
        if (both > loosened(rank_limit_) || second > loosened(stage_limit_)) break;
        if (goal_ == PartitionGoal::kSeconds && problem_.has_caps() &&
            !problem_.fits(problem_.rank_of(rank),
                           problem_.bytes(rank, front, middle) + problem_.bytes(up, end - b, end))) {
          break;
        }
        if (problem_.least(goal_, middle, end - b) > loosened((ranks_ - rank - 1) * rank_limit_)) continue;
        const size_t to = at(middle, back + b);
        const double value = combined(base, first, second);
        if (value >= next_[to]) continue;
        next_[to] = value;
        taken_[rank + 1][to] = {static_cast<int16_t>(a), static_cast<int16_t>(b)};
      }
    }
  }

  double combined(double base, double first, double second) const {
    if (aim_ == Aim::kRank) return std::max(base, first + second);
    if (aim_ == Aim::kStage) return std::max({base, first, second});
    return base + first * first + second * second;
  }

  std::vector<int> split() const {
    std::vector<int> counts(problem_.stages());
    int front = best_front_;
    int back = layers_ - front;
    for (int rank = ranks_; rank > 0; --rank) {
      const Taken& taken = taken_[rank][at(front, back)];
      counts[rank - 1] = taken.front;
      counts[problem_.stages() - rank] = taken.back;
      front -= taken.front;
      back -= taken.back;
    }
    return counts;
  }

  const PartitionProblem& problem_;
  PartitionGoal goal_;
  int layers_;
  int ranks_;
  Aim aim_ = Aim::kRank;
  double rank_limit_ = kInfinity;
  double stage_limit_ = kInfinity;
  double best_ = kInfinity;
  int best_front_ = 0;
  // By layers taken at either end: the aim's value with one rank fewer done, and with this rank done.
  std::vector<double> now_, next_;
  std::vector<std::vector<Taken>> taken_;  // by number of ranks that are done
};

}  // namespace

std::vector<int> split_v(const PartitionProblem& problem, PartitionGoal goal, double bound) {
  return VSplit(problem, goal).solve(bound);
}

}  // namespace twobp
