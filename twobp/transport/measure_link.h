// Measures the cost of a link between two ranks by ping-pong.
#pragma once

#include "twobp/core/link_speed.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Sends float tensors back and forth between the calling thread, which is rank 0, and a new thread for rank
// 1. Takes about `seconds` in total and returns medians. The transports must not be used otherwise. Throws what their
// waits throw.
LinkSpeed measure_link(Transport& rank0, Transport& rank1, double seconds = 0.2);

}  // namespace twobp
