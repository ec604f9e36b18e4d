// A simulated schedule in the form of a step that ran, so that the same pictures can be drawn of it.
#pragma once

#include <vector>

#include "twobp/pipeline/observer.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate.h"

namespace twobp {

// Times are the simulation's; bytes are thousandths of a micro-batch, held from F until the end of its W.
// `simulation` must be of this schedule with these costs.
StepReport simulated_step(const Schedule& schedule, const std::vector<StageCost>& costs,
                          const Simulation& simulation);

}  // namespace twobp
