// Bytes that standard backpropagation holds on each rank. The automatic byte cap (MemoryCap) derives from them.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

// Peak bytes of activations of each rank when `schedule` (p2 off: only F and B) runs with the given costs. Walks over
// each rank's own order, layer by layer. `stages[s]` has the costs of stage s's layers.
std::vector<int64_t> standard_peaks(const Schedule& schedule, const std::vector<std::vector<LayerCost>>& stages);

// The automatic caps in bytes, by rank. `fixed[r]`: bytes of parameters, gradients and optimizer state on rank r.
std::vector<int64_t> auto_caps(const std::vector<int64_t>& standard_peaks, const std::vector<int64_t>& fixed,
                               double times = 1);

}  // namespace twobp
