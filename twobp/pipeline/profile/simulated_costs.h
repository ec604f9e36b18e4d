// The costs of stages for the simulation, from measured layers.
#pragma once

#include <vector>

#include "twobp/pipeline/observer.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// The costs of each stage, from Pipeline::layer_costs(), without optimizer and fixed bytes, which a profile does not
// have. `batch`: what the samples of each micro-batch cost, over the mean of all samples; the costs are then rows for
// each micro-batch. Empty: all cost the same.
std::vector<StageCost> profiled_costs(const std::vector<std::vector<LayerCost>>& stages,
                                      const std::vector<double>& batch = {});

// The same, with the seconds of F, I, W and optimizer that a real step took. Those of its micro-batches and slices are
// divided as in the profile.
std::vector<StageCost> measured_costs(const std::vector<std::vector<LayerCost>>& stages,
                                      const std::vector<int>& rank_of_stage, const StepReport& report,
                                      const std::vector<double>& batch = {});

}  // namespace twobp
