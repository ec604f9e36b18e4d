// Internal to this folder: arrival times of messages, over links that carry one message at a time.
#pragma once

#include <cstddef>
#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/schedule/simulate/simulator.h"
#include "twobp/schedule/simulate/stage_model.h"

namespace twobp {

class Links {
 public:
  // Throws Error for links with ranks that do not exist, a pair twice, or impossible speeds.
  Links(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options);

  // Sends a message at `now` from the stage to the next one. `cost` is its cost_index. Returns its time of arrival.
  // Calls for one link must come in the order of time.
  double send_forward(size_t cost, double now) { return send(forward_[cost], now); }
  // The same, to the previous stage.
  double send_backward(size_t cost, double now) { return send(backward_[cost], now); }

 private:
  struct Link {
    double latency = 0;
    double bytes_per_second = 0;
    double free_at = 0;
  };
  struct Route {
    int link = -1;  // none: the neighbour is on the same rank
    double seconds = 0;
  };
  double send(const Route& route, double now);

  std::vector<Link> links_;
  std::vector<Route> forward_;  // by the cost of the sending stage
  std::vector<Route> backward_;
};

// Internal to this folder: sums of gradients over data-parallel replicas, next to the ranks' ops.
class GradientSums {
 public:
  GradientSums(const Schedule& schedule, const std::vector<StageCost>& costs, const DataParallel& parallel);

  // Book the ops of a stage, from `begin` on: pieces of a micro-batch's W; I of all layers, which completes the layers
  // without W; I and W of all layers. Calls of a rank come in the order of time.
  void pieces_ran(int stage, const StageModel& model, int first, int count, double begin);
  void p1_ran(int stage, const StageModel& model, double begin);
  void backward_ran(int stage, const StageModel& model, double begin);
  // Books I of one layer, which ends at `end`. Layers are counted from the stage's last one.
  void layer_ran(int stage, size_t layer, double end) {
    if (by_layer_) *(layer_done_[stage].rbegin() + static_cast<std::ptrdiff_t>(layer)) = end;
  }

  // Makes the ranks wait for their sums after their last op. `stage_done`, by stage: the end of its last W.
  void wait(const std::vector<double>& stage_done, std::vector<RankState>& ranks,
            std::vector<RankSimulation>& results) const;

 private:
  // Seconds that a link carries the sum of these gradients.
  double transfer(double bytes, double of_experts) const;
  // The time when each rank has its sums, on the rank's own link; 0 for a rank without sums. `stage_done`, by stage:
  // the end of its last W; `now`, by rank: the end of its last op.
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
