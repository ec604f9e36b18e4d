// Internal to this folder: the least bytes that a schedule's order of F and I needs, wherever its W run.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// Made once for all policies, costs and micro-batch sizes of a schedule. It follows no clock, so a query costs next to
// nothing compared with a simulation.
class OrderBytes {
 public:
  explicit OrderBytes(const Schedule& schedule);

  const std::vector<int>& rank_of_stage() const { return rank_of_stage_; }
  // By stage: the most micro-batches, or slices, that are between F and I at once.
  const std::vector<int>& in_flight() const { return in_flight_; }

  // Bytes of the fullest rank, fixed ones included: activations between F and I, and the growth by the current F or I.
  // No simulation of this order, whatever its policy and caps, has a smaller peak. `costs` are those of all stages, or
  // of all slices and stages.
  double least(const std::vector<StageCost>& costs) const;

 private:
  // The state before an F of the stage: micro-batches between F and I, by stage of the rank and slice.
  struct Moment {
    int stage = 0;
    int slice = 0;
    std::vector<int> held;
  };
  static void add(std::vector<Moment>& moments, Moment moment);

  int slices_;
  std::vector<int> rank_of_stage_;
  std::vector<int> in_flight_;
  std::vector<std::vector<int>> stages_of_rank_;
  std::vector<std::vector<Moment>> moments_;  // by rank; moments that another one covers are left out
};

}  // namespace twobp
