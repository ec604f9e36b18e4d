// Splits for placements without an exact method. The search starts from the split of the slowest stage. It moves one
// cut at a time to the best of all its places, then two cuts by one layer each, then all cuts between two stages by one
// layer, until nothing helps. Then some or all cuts are shaken, and it starts again. Deterministic.
#include <algorithm>
#include <array>
#include <random>

#include "twobp/plan/partition/problem.h"

namespace twobp {
namespace {

// With more cuts there are fewer shakes, because a pass over all cuts costs their square.
constexpr int kMostShakes = 400;
constexpr int kLeastShakes = 1;
constexpr int kShakenCuts = 8000;
// No split is better than an even one. This close to it, shaking is not worth its time.
constexpr double kGoodEnough = 1.005;

// The compared values, the first entry first: bytes over the caps, the worst rank, the slowest stage, squares.
using Value = std::array<double, 4>;

// Clearly less, so that rounding does not keep the search going.
bool less(const Value& a, const Value& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const double slack = 1e-12 * std::max(a[i], b[i]);
    if (a[i] < b[i] - slack) return true;
    if (a[i] > b[i] + slack) return false;
  }
  return false;
}

class SplitSearch {
 public:
  SplitSearch(const PartitionProblem& problem, PartitionGoal goal)
      : problem_(problem), goal_(goal), load_(problem.ranks()), bytes_(problem.ranks()) {}

  // `cuts` has stages + 1 entries, 0 first and the number of layers last.
  std::vector<int> run(std::vector<int> cuts) {
    Value best = descend(cuts);
    std::vector<int> best_cuts = cuts;
    std::mt19937 random(1);
    const int stages = problem_.stages();
    // With bytes this is a fallback that is called many times, so the first descent must suffice.
    const bool shaken = stages > 1 && goal_ == PartitionGoal::kSeconds && !problem_.has_caps();
    const int shakes = shaken ? std::clamp(kShakenCuts / (stages * stages), kLeastShakes, kMostShakes) : 0;
    const double even = problem_.least(goal_, 0, problem_.layers()) / problem_.ranks();
    for (int shake = 0; shake < shakes; ++shake) {
      if (best[0] == 0 && best[1] <= kGoodEnough * even) break;
      cuts = best_cuts;
      const int moved = shake % 4 == 3 ? 4 * stages : 1 + static_cast<int>(random() % 3);
      for (int i = 0; i < moved; ++i) {
        const size_t cut = 1 + random() % (stages - 1);
        const int room = cuts[cut + 1] - cuts[cut - 1] - 1;
        cuts[cut] = cuts[cut - 1] + 1 + static_cast<int>(random() % room);
      }
      if (shake % 2 == 0) {
        smooth_ = true;
        descend(cuts);
        smooth_ = false;
      }
      const Value value = descend(cuts);
      if (less(value, best)) best = value, best_cuts = cuts;
    }
    return best_cuts;
  }

 private:
  Value value_of(const std::vector<int>& cuts) {
    std::fill(load_.begin(), load_.end(), 0.0);
    std::fill(bytes_.begin(), bytes_.end(), 0.0);
    Value value{};
    for (int s = 0; s < problem_.stages(); ++s) {
      const double cost = problem_.goal(goal_, s, cuts[s], cuts[s + 1]);
      load_[problem_.rank_of(s)] += cost;
      bytes_[problem_.rank_of(s)] += problem_.bytes(s, cuts[s], cuts[s + 1]);
      value[2] = std::max(value[2], cost);
      value[3] += cost * cost;
    }
    value[1] = *std::max_element(load_.begin(), load_.end());
    if (smooth_) {
      value[1] = 0;
      for (const double load : load_) value[1] += load * load;
    }
    if (goal_ == PartitionGoal::kSeconds && problem_.has_caps()) {
      for (int r = 0; r < problem_.ranks(); ++r) {
        if (!problem_.fits(r, bytes_[r])) value[0] += bytes_[r] - problem_.cap(r);
      }
    }
    return value;
  }

  Value descend(std::vector<int>& cuts) {
    Value now = value_of(cuts);
    for (bool better = true; better;) {
      better = move_one(cuts, now);
      if (!better) better = move_two(cuts, now) || move_layer(cuts, now);
    }
    return now;
  }

  bool improves(const std::vector<int>& cuts, Value& now) {
    const Value value = value_of(cuts);
    if (!less(value, now)) return false;
    now = value;
    return true;
  }

  bool move_one(std::vector<int>& cuts, Value& now) {
    bool any = false;
    for (size_t cut = 1; cut + 1 < cuts.size(); ++cut) {
      int best = cuts[cut];
      for (int place = cuts[cut - 1] + 1; place < cuts[cut + 1]; ++place) {
        cuts[cut] = place;
        if (improves(cuts, now)) best = place, any = true;
      }
      cuts[cut] = best;
    }
    return any;
  }

  bool move_two(std::vector<int>& cuts, Value& now) {
    for (size_t a = 1; a + 1 < cuts.size(); ++a) {
      for (size_t b = a + 1; b + 1 < cuts.size(); ++b) {
        if (!share_a_rank(a, b)) continue;
        for (const int by_a : {-1, 1}) {
          for (const int by_b : {-1, 1}) {
            cuts[a] += by_a;
            cuts[b] += by_b;
            const bool grows =
                cuts[a] > cuts[a - 1] && cuts[a] < cuts[a + 1] && cuts[b] > cuts[b - 1] && cuts[b] < cuts[b + 1];
            if (grows && improves(cuts, now)) return true;
            cuts[a] -= by_a;
            cuts[b] -= by_b;
          }
        }
      }
    }
    return false;
  }

  // Moves a layer from one stage to another: all cuts between them move.
  bool move_layer(std::vector<int>& cuts, Value& now) {
    for (size_t first = 1; first + 1 < cuts.size(); ++first) {
      for (const int by : {-1, 1}) {
        std::vector<int> moved = cuts;
        for (size_t last = first; last + 1 < cuts.size(); ++last) {
          moved[last] += by;
          const bool grows = moved[first] > moved[first - 1] && moved[last] < moved[last + 1];
          if (grows && improves(moved, now)) {
            cuts = moved;
            return true;
          }
        }
      }
    }
    return false;
  }

  // A cut changes the ranks on its two sides.
  bool share_a_rank(size_t a, size_t b) const {
    for (const size_t of_a : {a - 1, a}) {
      for (const size_t of_b : {b - 1, b}) {
        if (problem_.rank_of(static_cast<int>(of_a)) == problem_.rank_of(static_cast<int>(of_b))) return true;
      }
    }
    return false;
  }

  const PartitionProblem& problem_;
  PartitionGoal goal_;
  bool smooth_ = false;               // minimize all ranks' squares instead of the worst rank: fewer plateaus
  std::vector<double> load_, bytes_;  // by rank
};

}  // namespace

std::vector<int> split_by_search(const PartitionProblem& problem, PartitionGoal goal) {
  std::vector<double> layers;
  for (int l = 0; l < problem.layers(); ++l) layers.push_back(problem.least(goal, l, l + 1));
  std::vector<int> cuts = {0};
  for (const int count : balanced_split(layers, problem.stages())) cuts.push_back(cuts.back() + count);
  cuts = SplitSearch(problem, goal).run(cuts);
  std::vector<int> split;
  for (int s = 0; s < problem.stages(); ++s) split.push_back(cuts[s + 1] - cuts[s]);
  if (goal == PartitionGoal::kSeconds && !keeps_caps(problem, split)) return {};
  return split;
}

}  // namespace twobp
