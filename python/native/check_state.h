// Which tensors a trainer takes into its weights and optimizer state.
#pragma once

#include <string>
#include <vector>

#include "twobp/nn/values.h"
#include "twobp/train/update/update.h"

namespace twobp::python {

// Throws Error unless `state` has a tensor for each live one, of its shape and kind of numbers, whose values the live
// one can hold. Only where the live one has numbers that are not finite, the other may have some too.
void check_state(const std::vector<LiveTensor>& live, const Fields& state);

}  // namespace twobp::python
