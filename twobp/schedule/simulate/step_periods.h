// Steps that follow each other: what is gained where a rank begins the next step as soon as it has ended its
// own part of the one before, whatever the others do.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct StepPeriods {
  double barrier = 0;  // seconds of a step at whose end every rank waits for the last one
  double overlap = 0;  // seconds from the end of a step to the end of the next where no rank waits
  double idle = 0;     // of these 1 - busy / overlap, mean over ranks

  // Times as fast as with a barrier.
  double gain() const { return overlap > 0 ? barrier / overlap : 1; }
};

// What a rank needs to know of the step before to begin one: nothing, or (with clipping, in float16) the norm
// of all gradients, which is there when the last rank has ended. It presumes what the norm will be, runs its
// leading F (check/leading_forwards.h), then waits.
enum class NormNeed : uint8_t { kNone, kAfterForwards };

// In the long run: steps are simulated until each takes as long as the one before on every rank, or for a
// mean over many. As in the executor, two steps can be under way at once. `options` without `begin` and
// `norm_known`; messages of a step find links and memory empty. Throws Error as simulate() does.
StepPeriods step_periods(const Schedule& schedule, const std::vector<StageCost>& costs,
                         SimulationOptions options = {}, NormNeed norm = NormNeed::kNone);

}  // namespace twobp
