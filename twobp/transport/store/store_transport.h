// Messages through a store (store_connection.h): for what is small and rare, between processes that were
// started without MPI (reports, sums of a few numbers, the heads of NCCL's messages). A message takes tens of
// microseconds, and all of them go through the process that runs the store. Host tensors only.
#pragma once

#include <memory>

#include "twobp/transport/store/store_connection.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Between all that have met there, with their ranks. A thread of its own takes in what comes, so that a look
// for a message costs nothing.
std::unique_ptr<Transport> make_store_transport(std::shared_ptr<StoreConnection> connection);

}  // namespace twobp
