// The effect of recomputation on a cost model: layers keep less and compute it again.
#pragma once

#include <string_view>

#include "twobp/plan/cost_model.h"

namespace twobp {

// Whether some layer was measured with recomputation. The effect of other recomputation on it is unknown.
bool computes_again(const CostModel& model);
// The model in which all layers but the first and the last recompute; `mode` is one of recompute_names(). Kinds that
// were measured with it ("mlp+both") keep their measurements. For others the costs follow from the layer's own. With
// activations, I becomes F + I. With derivatives, W becomes F + I + W. With both, both change. Layers are assumed to
// keep their input. Slices have only measured costs. Throws Error for an unknown mode, and for layers that were
// measured with recomputation.
CostModel with_recompute(const CostModel& model, std::string_view mode);

}  // namespace twobp
