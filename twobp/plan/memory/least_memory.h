// Internal to this folder: how little memory the planner's choices can need, without a simulation, and splits
// that need little.
#pragma once

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "twobp/plan/candidates.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// The least bytes that a schedule's order of F and I needs, wherever its W run.
// Made once for all policies, costs and micro-batch sizes of a schedule. It follows no clock, so a query
// costs next to nothing compared with a simulation.
class OrderBytes {
 public:
  explicit OrderBytes(const Schedule& schedule);

  const std::vector<int>& rank_of_stage() const { return rank_of_stage_; }
  // By stage: the most micro-batches, or slices, that are between F and I at once.
  const std::vector<int>& in_flight() const { return in_flight_; }

  // Bytes of the fullest rank, fixed ones included: activations between F and I, and the growth by the
  // current F or I. No simulation of this order, whatever its policy and caps, has a smaller peak. `costs`
  // are those of all stages, or of all slices and stages.
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

// The cost model with the choice's recomputation, which is one of `models`.
const CostModel& model_for(const ModelsByRecompute& models, const PlanChoice& choice);

// Keeps what choices share, so that each is computed once.
class LeastMemory {
 public:
  // `models` outlive this.
  LeastMemory(const ModelsByRecompute& models, bool one_memory) : models_(models), one_memory_(one_memory) {}

  // A lower bound of the fullest rank's bytes in any simulation of the choice with its split.
  double of_order(const PlanChoice& choice);
  // A lower bound for all ranks together: the fixed bytes, and the activations of one micro-batch. The stages
  // of a rank hold these at the same time, except for outputs that are sent on. So do the slices: all have
  // gone forward before the first I.
  double of_all_ranks(const PlanChoice& choice);
  // Gives the choice a split by activations and fixed bytes, because the stash of W can be freed early.
  // Returns false if there is no such split. `memory` 0: the split that needs the least.
  bool split_within(double memory, PlanChoice& choice);

 private:
  struct Least {
    double bytes = 0;
    double output = 0;  // the largest
  };

  // The order of F and I, which all policies share.
  const OrderBytes& order_of(const PlanChoice& choice);
  std::vector<int> make_split_within(double memory, const PlanChoice& choice, const OrderBytes& order) const;

  const ModelsByRecompute& models_;
  bool one_memory_;  // see WeightPlaces
  // By micro-batch size, slices, recomputation, streamed gradients and replicas.
  std::map<std::tuple<int, int, std::string, bool, int>, Least> least_;
  // By schedule, stages, ranks, micro-batches and slices.
  std::map<std::tuple<std::string, int, int, int, int>, OrderBytes> orders_;
  // Splits within the memory, by placement, micro-batches held, their size, slices, recomputation, streamed gradients
  // and replicas.
  std::map<std::tuple<std::vector<int>, std::vector<int>, int, int, std::string, bool, int, bool>, std::vector<int>>
      within_;
};

}  // namespace twobp
