// `twobp plan --measured TRACE`: a real run beside the simulation of the same schedule.
#pragma once

#include "apps/plan_options.h"

namespace twobp {

// Reads what `twobp train --trace` wrote, prints predicted against measured, and draws both with --timeline
// and --svg, tells both with --json. Throws Error for a trace that is not of this program.
void plan_measured(const PlanOptions& options);

}  // namespace twobp
