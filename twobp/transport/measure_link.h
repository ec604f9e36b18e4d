// What a link between two ranks costs, by ping-pong.
#pragma once

#include "twobp/transport/transport.h"

namespace twobp {

struct LinkSpeed {
  double latency = 0;           // seconds from a send until a small message has been received
  double bytes_per_second = 0;  // of large ones; 0: these take no longer than can be told from small ones
};

// Sends float tensors to and fro between the calling thread, which is rank 0, and a thread of its own for
// rank 1, about `seconds` in all; medians. The transports are not in use otherwise. Throws what their waits
// throw.
LinkSpeed measure_link(Transport& rank0, Transport& rank1, double seconds = 0.2);

}  // namespace twobp
