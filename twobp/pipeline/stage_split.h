// Layers to stages where none are given by hand: by a model's measured costs.
#pragma once

#include <vector>

#include "twobp/models/model.h"
#include "twobp/pipeline/profile/profile.h"

namespace twobp {

// Layers of each stage: the busiest rank as fast as possible (balanced_split). With one stage a rank, of the
// splits that are within 2 % of that, which profiles do not tell apart, the one whose fullest rank needs the
// least memory: activations of as many micro-batches as 1F1B holds on that stage, weights, their gradients
// and two numbers of optimizer state for each. With several, how even a rank's stages are counts instead.
// `costs`: by layer.
std::vector<int> measured_split(const ModelSpec& model, const std::vector<LayerProfile>& costs,
                                const std::vector<int>& rank_of_stage);

}  // namespace twobp
