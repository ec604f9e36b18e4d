// Measures links between ranks by ping-pong: their cost, and the difference of the clocks at their ends.
#pragma once

#include "twobp/core/measure.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Sends float tensors back and forth between the calling thread, which is rank 0, and a new thread for rank
// 1. Takes about `seconds` in total and returns medians. The transports must not be used otherwise. Throws what their
// waits throw.
LinkSpeed measure_link(Transport& rank0, Transport& rank1, double seconds = 0.2);

// The difference between the monotonic clocks of two processes. On another machine the clock began at another time.

// Rank 0 and `peer` of `transport` call this at the same time. Rank 0 gets the seconds by which the peer's
// now_seconds() is ahead of its own. The error is at most half the round trip of a message (the shortest of a few). The
// peer gets 0. Throws what waits throw.
double clock_ahead(Transport& transport, int peer, double timeout);

}  // namespace twobp
