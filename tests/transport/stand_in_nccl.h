// NCCL's functions between threads and processes of one machine, on streams of stand_in_device.h, by NCCL's rules: the
// ends of a communicator pair their calls by order alone, a call ends when all are there, the first one holds up
// whoever begins it until the other ends begin too, and an abort ends one's own end only. A peer that dies is not
// noticed.
//
// stand_in_nccl_library.cpp makes a libnccl.so.2 of it, which a program on the stand-in device loads.
#pragma once

#include <atomic>

#include "twobp/transport/nccl/nccl_api.h"

namespace twobp::test {

NcclApi stand_in_nccl();

// What this process's communicators do, from now on.
struct StandInNccl {
  std::atomic<int> error{0};            // reported by ncclCommGetAsyncError
  std::atomic<bool> loses_data{false};  // transfers never end
  std::atomic<bool> stuck{false};       // calls stay under way
  std::atomic<int> most_in_stream{0};   // sends of one communicator that were in its stream at once
  std::atomic<int64_t> bytes{0};        // that were received
  std::atomic<int> group_calls{0};      // sums and copies of all ends of a communicator
  std::atomic<int> ends{0};             // of communicators that were begun
  std::atomic<int> most_waiting{0};     // receives of one communicator that were in its stream at once
  std::atomic<int> unmatched{0};        // transfers that had no other side when their communicator was finalized
  std::atomic<int> waiting_ends{0};     // communicators that were destroyed before both ends were finalized
  std::atomic<int> version{22705};      // of the library
  std::atomic<int> most_ctas{0};        // of any communicator that was begun
  std::atomic<int> polls_under_way{0};  // polls that find a send under way
  std::atomic<int> polls_in_a_row{0};   // of these: the thread has not slept since the poll before
};
StandInNccl& stand_in_nccl_state();

}  // namespace twobp::test
