// Internal to this folder: what a schedule's order of F and I needs at the very least, wherever its W run.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// Made once for all policies, costs and micro-batch sizes of a schedule: no clock is followed, so that asking
// costs next to nothing beside a simulation.
class OrderBytes {
 public:
  explicit OrderBytes(const Schedule& schedule);

  const std::vector<int>& rank_of_stage() const { return rank_of_stage_; }
  // By stage: the most micro-batches between F and I at once.
  const std::vector<int>& in_flight() const { return in_flight_; }

  // Bytes of the fullest rank, fixed ones included: activations between F and I, and what the F or I under
  // way adds. No simulation of this order, whatever its policy and caps, has a smaller peak. `costs` are
  // those of all stages.
  double least(const std::vector<StageCost>& costs) const;

 private:
  // Before an F of the stage: micro-batches between F and I, by stage of the rank.
  struct Moment {
    int stage = 0;
    std::vector<int> held;
  };
  static void add(std::vector<Moment>& moments, Moment moment);

  std::vector<int> rank_of_stage_;
  std::vector<int> in_flight_;
  std::vector<std::vector<int>> stages_of_rank_;
  std::vector<std::vector<Moment>> moments_;  // by rank, those that no other one of the rank covers
};

}  // namespace twobp
