// `twobp plan` with a configuration or a cost model: finds the best way to run it.
#pragma once

#include "apps/plan_options.h"

namespace twobp {

// Measures or reads the costs, compares all combinations, and prints the best with the adviser's sentences. Throws
// Error if nothing fits into the memory, with the smallest memory that would suffice.
void plan_model(const PlanOptions& options);

}  // namespace twobp
