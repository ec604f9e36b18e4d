// `twobp plan --measured TRACE`: compares a real run with the simulation of the same schedule.
#pragma once

#include "apps/plan_options.h"

namespace twobp {

// Reads a trace of `twobp train --trace`, and prints predicted against measured values. Draws both with --timeline and
// --svg, and writes both with --json. Throws Error for a trace of another program.
void plan_measured(const PlanOptions& options);

}  // namespace twobp
