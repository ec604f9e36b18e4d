// What recomputation does to a cost model: layers that keep less and compute it again.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "twobp/plan/cost_model.h"

namespace twobp {

// "none", "activations", "derivatives", "both": what layers compute again (see nn/layers/recompute.h).
const std::vector<std::string>& recompute_modes();
// Whether some layer was measured computing again: what recomputation takes can't be told for it.
bool computes_again(const CostModel& model);
// The model in which all layers but the first and the last compute that again. Kinds measured so ("mlp+both")
// are taken; for others the costs follow from the layer's own: activations: I becomes F + I; derivatives: W
// becomes F + I + W; both: both. Layers are taken to keep their input. Throws Error for an unknown mode, and
// for layers that were measured computing again.
CostModel with_recompute(const CostModel& model, std::string_view mode);

}  // namespace twobp
