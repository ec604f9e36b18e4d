// How far another process's monotonic clock is ahead: on another machine it began at another time.
#pragma once

#include "twobp/transport/transport.h"

namespace twobp {

// Called by rank 0 and by `peer` of `transport` at the same time. On rank 0: seconds that the peer's
// now_seconds() is ahead of this rank's, to half the time of a message to and fro (the shortest of a few);
// on the peer 0. Throws what waits throw.
double clock_ahead(Transport& transport, int peer, double timeout);

}  // namespace twobp
