// What Python gives a trainer: the fields of a micro-batch, which mean what transformers means by them, and states.
#pragma once

#include <vector>

#include "twobp/data/data_config.h"
#include "twobp/nn/context.h"
#include "twobp/train/update/update.h"

namespace twobp::python {

// Throws Error that names a field which a configured model does not read. The fields of a captured model are those that
// it was captured with.
void check_given(const Fields& fields, const ModelInput& input);

// Returns the fields as the model reads them: labels are at the positions that predict them, and a mask is int64.
Fields as_read(Fields fields, const ModelInput& input);

// Throws Error unless `state` has a tensor for each live one, of its shape and kind of numbers, whose values the live
// one can hold. Only where the live one has numbers that are not finite, the other may have some too.
void check_state(const std::vector<LiveTensor>& live, const Fields& state);

}  // namespace twobp::python
