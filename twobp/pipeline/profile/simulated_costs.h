// Turns measured profiles into the costs that the simulation takes. Only this file sums layers into stages.
#pragma once

#include <vector>

#include "twobp/pipeline/observer.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// Seconds and bytes of one micro-batch.
LayerShare layer_share(const LayerProfile& layer);

// The costs of a stage with these layers: their sums, and each layer's own for the bytes within F, I and W.
// Optimizer and fixed bytes are left out, because the profile does not have them.
StageCost stage_cost(const std::vector<LayerProfile>& layers);

// The costs of each stage, from Pipeline::stage_profiles().
std::vector<StageCost> profiled_costs(const std::vector<std::vector<LayerProfile>>& stages);

// The same, with the seconds of F, I, W and optimizer that a real step took: means over its micro-batches.
std::vector<StageCost> measured_costs(const std::vector<std::vector<LayerProfile>>& stages,
                                      const std::vector<int>& rank_of_stage, const StepReport& report);

}  // namespace twobp
