// What the profile measured, as the simulation takes it: the one way from layers' costs to a stage's.
#pragma once

#include <vector>

#include "twobp/pipeline/observer.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// Seconds and bytes of one micro-batch.
LayerShare layer_share(const LayerProfile& layer);

// A stage of these layers, with their sums and all of them for the bytes within F, I and W. No optimizer and
// no fixed bytes: the profile does not know them.
StageCost stage_cost(const std::vector<LayerProfile>& layers);

// By stage, as Pipeline::stage_profiles() has them.
std::vector<StageCost> profiled_costs(const std::vector<std::vector<LayerProfile>>& stages);

// The same with the seconds of F, I, W and optimizer that a step really took: means over its micro-batches.
std::vector<StageCost> measured_costs(const std::vector<std::vector<LayerProfile>>& stages,
                                      const std::vector<int>& rank_of_stage, const StepReport& report);

}  // namespace twobp
