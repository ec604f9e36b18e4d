// Internal to this folder: the partition problem with sums over layers in constant time, and its solvers.
#pragma once

#include <limits>
#include <vector>

#include "twobp/plan/partition/partition.h"

namespace twobp {

// What is made as small as possible for the worst rank.
enum class PartitionGoal { kSeconds, kBytes };

class PartitionProblem {
 public:
  // Checks and throws as balanced_split says.
  PartitionProblem(const std::vector<double>& layer_seconds, const std::vector<int>& rank_of_stage,
                   const PartitionBytes& bytes);

  int layers() const { return static_cast<int>(seconds_.size()) - 1; }
  int stages() const { return static_cast<int>(rank_of_stage_.size()); }
  int ranks() const { return ranks_; }
  int rank_of(int stage) const { return rank_of_stage_[stage]; }
  // Layers [begin, end) as that stage.
  double seconds(int begin, int end) const { return seconds_[end] - seconds_[begin]; }
  double bytes(int stage, int begin, int end) const {
    return fixed_[end] - fixed_[begin] + in_flight_[stage] * (held_[end] - held_[begin]);
  }
  double goal(PartitionGoal goal, int stage, int begin, int end) const {
    return goal == PartitionGoal::kSeconds ? seconds(begin, end) : bytes(stage, begin, end);
  }
  // At most this for any stages: what is left for the ranks that are left.
  double least(PartitionGoal goal, int begin, int end) const {
    return goal == PartitionGoal::kSeconds
               ? seconds(begin, end)
               : fixed_[end] - fixed_[begin] + least_in_flight_ * (held_[end] - held_[begin]);
  }
  bool has_caps() const { return !caps_.empty(); }
  double cap(int rank) const { return caps_[rank]; }
  // Whether `bytes` on that rank are within its cap, but for rounding.
  bool fits(int rank, double bytes) const { return caps_.empty() || bytes <= caps_[rank] * (1 + 1e-12); }

  bool one_stage_a_rank() const { return stages() == ranks_; }
  bool is_v() const;

 private:
  std::vector<int> rank_of_stage_;
  int ranks_ = 0;
  std::vector<double> seconds_, fixed_, held_;  // sums over the layers before
  std::vector<double> in_flight_;               // by stage
  double least_in_flight_ = 1;
  std::vector<double> caps_;
};

// Goal per rank of a split, the worst of all.
double worst_rank(const PartitionProblem& problem, const std::vector<int>& split, PartitionGoal goal);
bool keeps_caps(const PartitionProblem& problem, const std::vector<int>& split);

// The solvers. The worst rank as good as possible; caps are kept where the goal is seconds and play no part
// where it is bytes. Empty when there is no such split (for the search: none was found).
// `most_seconds`: no stage may take longer.
std::vector<int> split_linear(const PartitionProblem& problem, PartitionGoal goal,
                              double most_seconds = std::numeric_limits<double>::infinity());
// `bound`: some split is known whose worst rank is not above it.
std::vector<int> split_v(const PartitionProblem& problem, PartitionGoal goal, double bound);
std::vector<int> split_by_search(const PartitionProblem& problem, PartitionGoal goal);

}  // namespace twobp
