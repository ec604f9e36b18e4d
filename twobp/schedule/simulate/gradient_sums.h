// Internal to this folder: gradients summed over data-parallel replicas, beside the ranks' ops.
#pragma once

#include <cstddef>
#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/rank_state.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/schedule/simulate/stage_model.h"

namespace twobp {

class GradientSums {
 public:
  GradientSums(const Schedule& schedule, const std::vector<StageCost>& costs, const DataParallel& parallel);

  // What has run of a stage, from `begin` on: pieces of a micro-batch's W; I of all layers, which completes
  // those without W; all layers' I and W. Calls of a rank come in the order of time.
  void pieces_ran(int stage, const StageModel& model, int first, int count, double begin);
  void p1_ran(int stage, const StageModel& model, double begin);
  void backward_ran(int stage, const StageModel& model, double begin);
  // I of one layer until `end`, counted from the stage's last.
  void layer_ran(int stage, size_t layer, double end) {
    if (by_layer_) *(layer_done_[stage].rbegin() + static_cast<std::ptrdiff_t>(layer)) = end;
  }

  // Has the ranks wait for their sums after their last op. `stage_done` by stage: its last W.
  void wait(const std::vector<double>& stage_done, std::vector<RankState>& ranks,
            std::vector<RankSimulation>& results) const;

 private:
  // When each rank has its sums, 0 for one without, on the rank's own link. `stage_done` by stage: its last
  // W; `now` by rank: its last op.
  std::vector<double> done(const std::vector<double>& stage_done, const std::vector<double>& now) const;
  std::vector<double> by_stage(const std::vector<double>& stage_done, const std::vector<double>& now) const;

  const Schedule& schedule_;
  const std::vector<StageCost>& costs_;
  DataParallel parallel_;
  bool by_layer_;
  std::vector<std::vector<int>> layer_of_piece_;  // by stage
  std::vector<std::vector<double>> layer_done_;   // by stage, layer
};

}  // namespace twobp
