// Ranks as threads whose messages go through a store, through the stand-in for NCCL, or through NCCL itself.
#pragma once

#include <functional>
#include <memory>

#include "tests/transport/transports.h"
#include "twobp/nn/device/device.h"
#include "twobp/transport/nccl/nccl.h"
#include "twobp/transport/store/store_connection.h"

namespace twobp::test {

// A port of this machine that nobody listens at.
int free_port();

// Runs body(rank) on a thread for each rank; rethrows what one throws first.
void run_on_threads(int ranks, const std::function<void(int rank)>& body);

// body(host) with the endpoints of a store.
void run_on_store(int ranks, const std::function<void(std::shared_ptr<Transport>)>& body);

// GPUs that NCCL can use here; 0 also where there is no NCCL.
int nccl_gpus();

// All ordered pairs.
NcclLinks all_links(int ranks);

// Host tensors by way of a device: those that `inner` sends are copied to it first (of a stand-in, they are
// the same), and what arrives is waited for and copied back, so that whoever uses it needs no stream.
std::unique_ptr<Transport> by_way_of(const Device& device, std::unique_ptr<Transport> inner);

}  // namespace twobp::test
