// Internal to this folder: the simulation itself, for a schedule and costs that have been checked.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/simulate.h"
#include "twobp/schedule/w_queue.h"

namespace twobp {

// `fills`: whether ranks run W in any wait.
Simulation run_simulation(const Schedule& schedule, const std::vector<StageCost>& costs,
                          const SimulationOptions& options, bool fills);

}  // namespace twobp
