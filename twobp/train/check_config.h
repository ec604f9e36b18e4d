// Checks for contradictions between keys of several sections.
#pragma once

#include "twobp/train/config.h"

namespace twobp {

// Throws Error. Checks that need the data or the model itself (token ids, more stages than layers) are made where these
// are available.
void check_contradictions(const Config& config);
// The same for a run with data of the caller's own.
void check_contradictions_without_data(const Config& config);

// Throws Error if the configuration cannot train with so many slices (pipeline.slices), whatever the schedule.
void check_slices(const Config& config, int slices);

}  // namespace twobp
