// What a link between two ranks costs, by ping-pong.
#pragma once

#include "twobp/core/link_speed.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Sends float tensors to and fro between the calling thread, which is rank 0, and a thread of its own for
// rank 1, about `seconds` in all; medians. The transports are not in use otherwise. Throws what their waits
// throw.
LinkSpeed measure_link(Transport& rank0, Transport& rank1, double seconds = 0.2);

}  // namespace twobp
