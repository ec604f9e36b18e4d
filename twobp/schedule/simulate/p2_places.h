// Decides in advance where W fills waits, for ranks on devices: their host runs ahead and sees no waits.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// Returns a number of pieces of W by rank and instruction. At a receive, it is the number of pieces that the rank has
// run in the simulated step before the F or I that waits for the message begins. A rank that runs W up to this number
// at each receive fills the same waits as the simulation. At other instructions, the number is 0. Throws Error if
// `simulation`, which is of `schedule`, has no timeline.
std::vector<std::vector<int>> p2_places(const Schedule& schedule, const Simulation& simulation);

}  // namespace twobp
