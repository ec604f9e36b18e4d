// Contradictions between keys of several sections.
#pragma once

#include "twobp/train/config.h"

namespace twobp {

// What needs the data or the model itself (token ids, more stages than layers) is checked where that is.
// Throws Error.
void check_contradictions(const Config& config);

}  // namespace twobp
