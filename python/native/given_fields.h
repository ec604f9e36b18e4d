// The fields of a micro-batch as Python gives them, which mean what transformers means by them.
#pragma once

#include "twobp/data/data_config.h"
#include "twobp/nn/context.h"

namespace twobp::python {

// Throws Error that names a field which a configured model does not read. The fields of a captured model are those that
// it was captured with.
void check_given(const Fields& fields, const ModelInput& input);

// Returns the fields as the model reads them: labels are at the positions that predict them, and a mask is int64.
Fields as_read(Fields fields, const ModelInput& input);

}  // namespace twobp::python
