// Runs ranks as threads whose messages go through a store, through the stand-in for NCCL, or through NCCL itself.
#pragma once

#include <functional>
#include <memory>

#include "tests/free_port.h"
#include "tests/transport/transports.h"
#include "twobp/nn/device/device.h"
#include "twobp/transport/nccl/nccl.h"
#include "twobp/transport/store/store_connection.h"

namespace twobp::test {

// Runs body(rank) on a thread for each rank. Rethrows the first exception.
void run_on_threads(int ranks, const std::function<void(int rank)>& body);

// Runs body(host) with the endpoints of a store.
void run_on_store(int ranks, const std::function<void(std::shared_ptr<Transport>)>& body);

// Returns the number of GPUs that NCCL can use here, or 0 if there is no NCCL.
int nccl_gpus();

// Returns all ordered pairs of ranks.
NcclLinks all_links(int ranks);

// Sends host tensors through a device. Tensors that `inner` sends are first copied to the device (a stand-in needs no
// copy). Received tensors are copied back before they are returned, so the caller needs no stream.
std::unique_ptr<Transport> by_way_of(const Device& device, std::unique_ptr<Transport> inner);

}  // namespace twobp::test
