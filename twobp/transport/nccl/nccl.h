// Ranks as processes with a GPU each, messages between the GPUs by NCCL.
//
// How a message travels. NCCL pairs sends with receives by their order alone, knows neither tags nor
// shapes, and a send may not end before the receive is there. So:
// - Each ordered pair of ranks that may talk is a link (nccl_link.h): a communicator of the two and a
//   stream at each end, made at the start. Between two ranks the directions never wait for each other, and
//   nothing on a link waits for a compute stream but the data that is sent.
// - A head (tag, types, shapes, strides; tensors of the host with their numbers) goes over a host
//   transport, MPI or a store, numbered per ordered pair. The sender puts the tensors into its stream and
//   then sends the head; the receiver takes the heads in order of their numbers and puts the receives into
//   its stream. So both ends see one order, and a receive begins only when its send has begun: no order of
//   the ranks' instructions can make two links wait for each other. Messages are kept by tag until they are
//   asked for.
// - Shapes could be agreed once per stage and direction, but not the order: with `fill`, and with schedules
//   from a file, a receiver need not ask in the sender's order. Hosts run ahead of their GPUs, which hides
//   a head's time.
// - At most kUnderWay transfers of a link are in its stream; more wait on the host and go out when ranks
//   look for messages, between layers, or in flush(). Thousands of launches that wait in streams would
//   block the launching thread, and with it the receives that the other side waits for. (What may still
//   block it is the allocator when memory runs out, since cudaFree waits for kernels: the time-out ends
//   that.)
// - No group calls: a group of sends and receives of several links begins as one, and would wait for all of
//   their peers. Nothing here blocks a host thread after the start, where all links are connected in one
//   order.
// - A received tensor is handed over at once; the compute stream waits for it by event, the caller does
//   not.
//
// A thread of its own looks after time-outs and errors, since a rank's thread may be waiting for its GPU:
// it aborts the communicators, which ends NCCL's kernels and so that wait.
//
// Sums (collectives.h) are made of these messages, in rank order, with the same bits as on every transport.
// ncclAllReduce would take their place in AllReduce, one communicator per group; it is faster between many
// GPUs and repeats its own bits, but not those of a run on another transport.
//
// To be started with torchrun --no-python or srun, or with mpirun where MPI is built in.
#pragma once

#include <utility>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/transport/nccl/nccl_api.h"
#include "twobp/transport/world.h"

namespace twobp {

struct NcclOptions {
  double timeout = 300;  // seconds for a connection and for a transfer
  double connection_timeout = 120;
  at::DeviceType tensors = at::kCUDA;  // where those are that go by NCCL; others go with the head
};

// From rank to rank, both of the host transport.
using NcclLinks = std::vector<std::pair<int, int>>;

// All ranks of `host` call it, with the same links; `host` is used by nobody else afterwards. To be used on a
// thread whose current stream is device.compute().
std::unique_ptr<Transport> make_nccl_transport(std::shared_ptr<Transport> host, const NcclApi& api,
                                               const Device& device, const NcclLinks& links,
                                               const NcclOptions& options = {});

// This process's part of a run of `replicas` x `ranks` processes: process p is rank p % ranks of replica
// p / ranks, as in make_mpi_world. Links between all ranks of a pipeline and between all replicas of a place.
World make_nccl_world(std::shared_ptr<Transport> host, const NcclApi& api, const Device& device, int replicas,
                      int ranks, const NcclOptions& options = {});

}  // namespace twobp
