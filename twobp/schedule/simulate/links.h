// Internal to this folder: arrival times of messages, over links that carry one message at a time.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

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

}  // namespace twobp
