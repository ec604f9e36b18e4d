// The samples on which a profile measures.
#pragma once

#include <cstdint>

#include "twobp/data/data.h"
#include "twobp/pipeline/profile/profile.h"

namespace twobp {

// A micro-batch of `size` samples with costs near the mean, at most data.size(). If samples cost unequally, also one of
// as many copies of the costliest sample: no micro-batch costs more.
ProfiledBatch profiled_batch(const Dataset& data, int64_t size);

}  // namespace twobp
