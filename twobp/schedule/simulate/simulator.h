// Internal to this folder: the simulation itself, for a schedule and costs that have been checked.
#pragma once

#include <cmath>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// Sums of the same costs in another order differ in the last digits. This must not cause another piece of W
// to run.
inline bool exceeds(double a, double b) {
  return a > b + 1e-9 * std::abs(b);
}

// `fills`: whether ranks run W in any wait.
Simulation run_simulation(const Schedule& schedule, const std::vector<StageCost>& costs,
                          const SimulationOptions& options, bool fills);

}  // namespace twobp
