// Ranks in several processes, with a GPU each. NCCL carries the messages between the GPUs.
//
// How a message travels. NCCL pairs sends with receives by their order alone and knows neither tags nor shapes. A send
// may not end before its receive exists. So:
// - Each ordered pair of ranks that may communicate is a link (nccl_link.h): a communicator of the two ranks
//   and a stream at each end, made at the start. The two directions between two ranks never wait for each
//   other. Only the data that is sent waits for a compute stream; nothing else on a link does.
// - In a training step, both ends know the order of the messages between them from the plan, and from the second step
//   on most forms. Such expected messages have no head. The sender launches the transfer at once, behind the work that
//   makes the tensors. The receiver launches it when the rank asks for the message, after all that its sender sends
//   before: a kernel that waits for what its own rank has still to cause would block cudaFree, and with it that rank.
//   The rank goes on while at most kReceivesUnderWay of a link's receives are under way; its stream waits.
// - Other messages have a head (tag, types, shapes, strides, and the contents of host tensors) over a host transport,
//   MPI or a store. Its number is that of the message among all of this ordered pair. The sender launches the transfer
//   when the device has made the tensors, since the receiver's kernel would hold multiprocessors until then, and sends
//   the head. The receiver launches it when the head and all messages before are there. No order of the ranks'
//   instructions can make two links wait for each other. Messages are kept by tag until the rank asks for them.
// - Few transfers of a link are in its stream. Further ones wait on the host, and are launched when ranks look for
//   messages, between layers, or in flush(). Thousands of launches waiting in streams would block the launching thread,
//   and with it the receives for which the other side waits. (The allocator may still block it when memory runs out,
//   because cudaFree waits for kernels. The time-out ends that.)
// - There are no group calls. A group of sends and receives of several links begins as one, and would wait
//   for all their peers. After the start, where all links are connected in one order, nothing here blocks a
//   host thread.
// - The caller's current stream waits for a transfer by an event.
//
// A separate thread handles time-outs and errors, because a rank's thread may be waiting for its GPU. It aborts the
// communicators, which ends NCCL's kernels and thus that wait. It also launches sends that wait on the host, for a rank
// that is busy elsewhere. It allocates nothing, and looks for time-outs without the lock that a launch holds.
//
// Sums (collectives.h) are made of these messages, in rank order, with the same bits as on every transport. With
// NcclOptions::group_sums, they are NCCL's own, in one communicator of all ranks that sum together (nccl_group.h). So a
// rank needs one communicator for any number of replicas, and no heads. Their bits should repeat on the same machines,
// but differ from those of a run on another transport.
//
// Start the program with torchrun --no-python or srun, or with mpirun if MPI is built in.
#pragma once

#include <utility>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/transport/nccl/nccl_api.h"
#include "twobp/transport/start.h"

namespace twobp {

struct NcclOptions {
  double timeout = 300;  // in seconds, for a connection and for a transfer
  double connection_timeout = 120;
  at::DeviceType tensors = at::kCUDA;  // the device type whose tensors use NCCL; others go with the head
  bool group_sums = false;             // in make_nccl_world: over replicas by NCCL's own sums
};

// Pairs (from rank, to rank) of the host transport.
using NcclLinks = std::vector<std::pair<int, int>>;

// All ranks of `host` call this with the same links. Nothing else uses `host` afterwards. What is sent was made in the
// caller's current stream, and what is received is used there. `sums_with`: the ranks, with this one, that have sums of
// their own (Transport::sums_of); all of these give the same.
std::unique_ptr<Transport> make_nccl_transport(std::shared_ptr<Transport> host, const NcclApi& api,
                                               const Device& device, const NcclLinks& links,
                                               const NcclOptions& options = {}, const std::vector<int>& sums_with = {});

// This process's part of a run of `replicas` x `ranks` ranks (make_process_world). `hosts` are the endpoints of its
// ranks, which nothing else uses afterwards, and `devices` are their GPUs. There are links between the ranks of
// neighbouring stages, of the first and the last one (which often share a weight), and between the same rank of all
// replicas, unless these have group_sums. What goes between other ranks goes through the host.
World make_nccl_world(const Ends& hosts, const NcclApi& api, const std::vector<Device>& devices, int replicas,
                      int ranks, const std::vector<int>& rank_of_stage, const NcclOptions& options = {});

}  // namespace twobp
