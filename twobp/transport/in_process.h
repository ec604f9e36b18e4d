// Transport between threads of one process: a mailbox per rank; tensors are handed over, not copied.
#pragma once

#include <memory>
#include <vector>

#include "twobp/transport/transport.h"

namespace twobp {

// Endpoints of `ranks` ranks that talk to each other. Waits spin for `spin_seconds` before they sleep: worth
// it when every rank has a core of its own.
std::vector<std::unique_ptr<Transport>> make_in_process_transports(int ranks, double spin_seconds);

}  // namespace twobp
