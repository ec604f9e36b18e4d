// A simulated schedule in the form of a real step, so that the same pictures can be drawn of it.
#pragma once

#include <vector>

#include "twobp/pipeline/observer.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

inline constexpr double kMicroBatchUnit = 1000;

// Times are those of the simulation. Bytes are its bytes times `byte_unit`: thousandths of a micro-batch if the costs
// count micro-batches, 1 if they are bytes. They are the simulation's, at the end of each op and at the rank's peak.
// `simulation` must have its timeline.
StepReport simulated_step(const Simulation& simulation, double byte_unit = kMicroBatchUnit);

}  // namespace twobp
