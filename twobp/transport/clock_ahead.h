// The difference between the monotonic clocks of two processes. On another machine the clock began at another time.
#pragma once

#include "twobp/transport/transport.h"

namespace twobp {

// Rank 0 and `peer` of `transport` call this at the same time. Rank 0 gets the seconds by which the peer's
// now_seconds() is ahead of its own. The error is at most half the round trip of a message (the shortest of a few). The
// peer gets 0. Throws what waits throw.
double clock_ahead(Transport& transport, int peer, double timeout);

}  // namespace twobp
