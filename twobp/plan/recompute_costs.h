// The effect of recomputation on a cost model: layers keep less and compute it again.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "twobp/plan/cost_model.h"

namespace twobp {

// "none", "activations", "derivatives", "both": what layers recompute (see nn/layers/recompute.h).
const std::vector<std::string>& recompute_modes();
// Whether some layer was measured with recomputation. The effect of other recomputation on it is unknown.
bool computes_again(const CostModel& model);
// The model in which all layers but the first and the last recompute. Kinds that were measured with this mode
// ("mlp+both") keep their measurements. For others the costs follow from the layer's own. With activations, I
// becomes F + I. With derivatives, W becomes F + I + W. With both, both change. Layers are assumed to keep
// their input. Slices have only measured costs. Throws Error for an unknown mode, and for layers that were
// measured with recomputation.
CostModel with_recompute(const CostModel& model, std::string_view mode);

}  // namespace twobp
