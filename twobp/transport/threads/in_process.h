// Transport between threads of one process: a mailbox per rank; tensors are handed over, not copied,
// unless they go to another GPU.
#pragma once

#include <memory>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Endpoints of `ranks` ranks that talk to each other. Waits spin for `spin_seconds` before they sleep: worth
// it when every rank has a core of its own. `devices`: where each rank computes, empty for the CPU. A tensor
// of another GPU is copied from peer to peer, with events and without a wait of the host.
std::vector<std::unique_ptr<Transport>> make_in_process_transports(int ranks, double spin_seconds,
                                                                   const std::vector<Device>& devices = {});

}  // namespace twobp
