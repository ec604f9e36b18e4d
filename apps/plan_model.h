// `twobp plan` with a configuration or a cost model: which way to run it.
#pragma once

#include "apps/plan_options.h"

namespace twobp {

// Measures or reads the costs, compares all combinations and prints the best with the adviser's sentences.
// Throws Error when nothing fits into the memory, naming the smallest that would.
void plan_model(const PlanOptions& options);

}  // namespace twobp
