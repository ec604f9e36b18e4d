// Consecutive steps: the gain if a rank begins the next step as soon as it has ended its own part of the previous one,
// whatever the others do.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct StepPeriods {
  double barrier = 0;  // seconds of a step if every rank waits at its end for the last one
  double overlap = 0;  // seconds from the end of a step to the end of the next if no rank waits
  double idle = 0;     // 1 - busy / overlap, mean over ranks

  // The speed-up over steps with a barrier.
  double gain() const { return overlap > 0 ? barrier / overlap : 1; }
};

// The result of the previous step that a rank needs to begin a step. It is nothing, or (with clipping, in float16) the
// norm of all gradients, which is known when the last rank has ended. In that case the rank assumes a norm, runs its
// leading F (check/leading_forwards.h), and then waits.
enum class NormNeed : uint8_t { kNone, kAfterForwards };

// The long run: simulates steps until each takes as long as the previous one on every rank, or else takes the mean over
// many. As in the executor, two steps can be under way at once. `options` has no `begin` and no `norm_known`. The
// messages of a step find links and memory empty. Throws Error as simulate() does.
StepPeriods step_periods(const Schedule& schedule, const std::vector<StageCost>& costs, SimulationOptions options = {},
                         NormNeed norm = NormNeed::kNone);

}  // namespace twobp
