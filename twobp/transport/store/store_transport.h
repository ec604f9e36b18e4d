// Messages through a store (store_connection.h), for small and rare messages between processes that were started
// without MPI (reports, sums of a few numbers, the heads of NCCL's messages). A message takes tens of microseconds, and
// all of them go through the process that runs the store. Only host tensors are supported.
#pragma once

#include <cstddef>
#include <memory>

#include "twobp/transport/store/store_connection.h"
#include "twobp/transport/transport.h"

namespace twobp {

// A transport between all processes at the store, with their ranks. A separate thread receives, so that looking for a
// message costs nothing. It fails when messages without an end have more than `most_unfinished` bytes: no rank sends so
// much.
std::unique_ptr<Transport> make_store_transport(std::shared_ptr<StoreConnection> connection,
                                                size_t most_unfinished = size_t{1} << 30);

}  // namespace twobp
