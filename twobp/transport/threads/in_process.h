// Transport between threads of one process, with a mailbox per rank. Tensors are passed on without a copy, unless they
// go to another GPU.
#pragma once

#include <memory>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Endpoints of `ranks` ranks that communicate with each other. Waits spin for `spin_seconds` before they sleep, which
// pays if every rank has a core of its own. `devices` has each rank's device and is empty for the CPU. A tensor of
// another GPU is copied from peer to peer, with events and without a wait of the host.
std::vector<std::unique_ptr<Transport>> make_in_process_transports(int ranks, double spin_seconds,
                                                                   const std::vector<Device>& devices = {});

}  // namespace twobp
