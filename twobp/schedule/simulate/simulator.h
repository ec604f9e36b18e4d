// Internal to this folder: the simulation itself, of a schedule and costs that have been checked.
#pragma once

#include <cmath>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// Sums of the same costs in another order differ in the last digits; that must not buy another piece of W.
inline bool exceeds(double a, double b) {
  return a > b + 1e-9 * std::abs(b);
}

// `fills`: whether ranks run W in any wait.
Simulation run_simulation(const Schedule& schedule, const std::vector<StageCost>& costs,
                          const SimulationOptions& options, bool fills);

}  // namespace twobp
