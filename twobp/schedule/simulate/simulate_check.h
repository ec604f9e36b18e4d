// Internal to this folder and to plan/: rejects costs and options that make no sense.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// Throws Error that names the stage and the fault in its cost.
void check_stage_cost(const StageCost& cost, int stage);

// Throws Error that names the stage or the option.
void check_simulation_inputs(const Schedule& schedule, const std::vector<StageCost>& costs,
                             const SimulationOptions& options);

}  // namespace twobp
