// The one mechanism of the zero-bubble schedules: given the order of F and I on each rank, puts W where the
// rank would wait.
#pragma once

#include "twobp/schedule/schedule.h"

namespace twobp {

// Runs a schedule of F and I (each stage's in micro-batch order) with F, I and W of one unit each and
// messages that take no time. A rank runs its next F or I as soon as its input is there; while it is not, or
// before an F that would make it hold more than `most_in_flight`, it runs its oldest pending W. What is left
// runs at the end. No W runs before it must, so no F or I could run earlier in this order within the limit.
//
// Held is a stage's micro-batch from its F until the end of its W: for a rank with several stages, all of
// them count. An F that has no room although no W is pending runs anyway: the order asks for it.
//
// That is what `fill` does in the simulation under a cap, at these costs (the test compares them); apart from
// it, as whole ticks and counts in place of seconds and bytes are several times faster, and generators run by
// the thousand in a search. Time is linear in the instructions. Throws Error when the order can never run to
// its end.
Schedule place_p2(Schedule schedule, int most_in_flight);

}  // namespace twobp
