// Replaces NCCL's functions between threads of one process, on streams of stand_in_device.h. It follows
// NCCL's rules. The two ends of a communicator pair their calls by order only. A transfer ends when both ends
// are there. The first transfer blocks the end that begins it until the other end begins, too. An abort ends
// only the caller's own end.
#pragma once

#include <atomic>

#include "twobp/transport/nccl/nccl_api.h"

namespace twobp::test {

NcclApi stand_in_nccl();

// These settings apply to communicators from now on.
struct StandInNccl {
  std::atomic<int> error{0};            // reported by ncclCommGetAsyncError
  std::atomic<bool> loses_data{false};  // transfers never end
  std::atomic<bool> stuck{false};       // calls stay in progress
  std::atomic<int> most_in_stream{0};   // the most sends of one communicator that were in its stream at once
  std::atomic<int64_t> bytes{0};        // bytes that have crossed
  std::atomic<int> waiting_ends{0};     // communicators that were destroyed before both ends were finalized
};
StandInNccl& stand_in_nccl_state();

}  // namespace twobp::test
