// Where W fills waits, for ranks that cannot see their waits: the host of a device runs ahead of it.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// By rank and instruction. At a receive: the pieces of W that the rank has run in the simulated step when the
// F or I that waits for the message begins, all earlier ones included. So a rank that runs W until it has run
// as many fills the waits that the simulation has, and those alone. At other instructions: 0. Throws Error if
// `simulation`, which is of `schedule`, has no timeline.
std::vector<std::vector<int>> p2_places(const Schedule& schedule, const Simulation& simulation);

}  // namespace twobp
