// The common mechanism of the zero-bubble schedules: given the order of F and I on each rank, it places W where the
// rank would wait.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

// Runs a schedule of F and I (in micro-batch order within each stage). F, I and W take one unit each, and messages take
// no time. A rank runs its next F or I as soon as its input has arrived. Until then, and before an F that would bring
// it above `most_in_flight`, it runs its oldest pending W. The rest of W runs at the end. No W runs before it must, so
// within the limit no F or I of this order could run earlier.
//
// A micro-batch of a stage counts as in flight from its F to the end of its W, over all stages of the rank. An F that
// has no room although no W is pending runs anyway, because the order asks for it.
//
// The simulation's `fill` under a cap does the same at these costs (the test compares them). This is separate code
// because whole ticks and counts are several times faster than seconds and bytes, and a search runs generators by the
// thousand. Time is linear in the instructions. Throws Error if the order can never run to its end.
Schedule place_p2(Schedule schedule, int most_in_flight);

}  // namespace twobp
