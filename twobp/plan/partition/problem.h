// Internal to this folder: the partition problem with sums over layers in constant time, and its solvers.
#pragma once

#include <limits>
#include <vector>

#include "twobp/plan/partition/partition.h"

namespace twobp {

// The quantity that is minimized for the worst rank.
enum class PartitionGoal { kSeconds, kBytes };

class PartitionProblem {
 public:
  // Checks the inputs and throws as documented at balanced_split.
  PartitionProblem(const std::vector<double>& layer_seconds, const std::vector<int>& rank_of_stage,
                   const PartitionBytes& bytes);

  int layers() const { return static_cast<int>(seconds_.size()) - 1; }
  int stages() const { return static_cast<int>(rank_of_stage_.size()); }
  int ranks() const { return ranks_; }
  int rank_of(int stage) const { return rank_of_stage_[stage]; }
  // Seconds and bytes of layers [begin, end) as this stage.
  double seconds(int begin, int end) const { return seconds_[end] - seconds_[begin]; }
  double bytes(int stage, int begin, int end) const {
    return fixed_[end] - fixed_[begin] + in_flight_[stage] * (held_[end] - held_[begin]);
  }
  double goal(PartitionGoal goal, int stage, int begin, int end) const {
    return goal == PartitionGoal::kSeconds ? seconds(begin, end) : bytes(stage, begin, end);
  }
  // A lower bound of the goal for these layers on any stages: the part that remains for the remaining ranks.
  double least(PartitionGoal goal, int begin, int end) const {
    return goal == PartitionGoal::kSeconds
               ? seconds(begin, end)
               : fixed_[end] - fixed_[begin] + least_in_flight_ * (held_[end] - held_[begin]);
  }
  bool has_caps() const { return !caps_.empty(); }
  double cap(int rank) const { return caps_[rank]; }
  // Whether `bytes` on this rank are within its cap, apart from rounding.
  bool fits(int rank, double bytes) const { return caps_.empty() || bytes <= caps_[rank] * (1 + 1e-12); }

  bool one_stage_a_rank() const { return stages() == ranks_; }
  bool is_v() const;

 private:
  std::vector<int> rank_of_stage_;
  int ranks_ = 0;
  std::vector<double> seconds_, fixed_, held_;  // sums over all earlier layers
  std::vector<double> in_flight_;               // by stage
  double least_in_flight_ = 1;
  std::vector<double> caps_;
};

// The goal of the worst rank of a split.
double worst_rank(const PartitionProblem& problem, const std::vector<int>& split, PartitionGoal goal);
bool keeps_caps(const PartitionProblem& problem, const std::vector<int>& split);

// The solvers. They make the worst rank as good as possible. Caps are kept if the goal is seconds and ignored if it is
// bytes. The result is empty if there is no such split (for the search: if none was found). `most_seconds`: no stage
// may take longer.
std::vector<int> split_linear(const PartitionProblem& problem, PartitionGoal goal,
                              double most_seconds = std::numeric_limits<double>::infinity());
// `bound`: some split exists whose worst rank is not above it.
std::vector<int> split_v(const PartitionProblem& problem, PartitionGoal goal, double bound);
std::vector<int> split_by_search(const PartitionProblem& problem, PartitionGoal goal);

}  // namespace twobp
