// The costs of stages for the simulation, from measured layers.
#pragma once

#include <vector>

#include "twobp/pipeline/observer.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// The costs of each stage, from Pipeline::layer_costs(), without optimizer and fixed bytes, which a profile
// does not have.
std::vector<StageCost> profiled_costs(const std::vector<std::vector<LayerCost>>& stages);

// The same, with the seconds of F, I, W and optimizer that a real step took: means over its micro-batches.
std::vector<StageCost> measured_costs(const std::vector<std::vector<LayerCost>>& stages,
                                      const std::vector<int>& rank_of_stage, const StepReport& report);

}  // namespace twobp
