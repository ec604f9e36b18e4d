// The samples on which a profile measures.
#pragma once

#include <cstdint>

#include "twobp/data/data.h"
#include "twobp/pipeline/profile/profile.h"

namespace twobp {

// A micro-batch of `size` samples with costs near the mean, and one of the costliest ones if samples cost
// unequally; at most data.size() samples.
ProfiledBatch profiled_batch(const Dataset& data, int64_t size);

}  // namespace twobp
