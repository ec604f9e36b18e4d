// Ranks as processes that PyTorch connected: messages over a c10d::ProcessGroup whose send and recv carry host memory,
// such as Gloo's. Only these two virtual functions of the group are used. The group is the caller's. The caller may use
// it at the same time with other tags.
#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "twobp/transport/world.h"

namespace twobp {

struct C10dOptions {
  // Transports over the same group need different numbers, the same on all processes.
  int channel = 0;
  double spin_seconds = 50e-6;
  // A group gives up a receive that takes longer than its time-out. A rank that has nothing to send tells the others so
  // after this many seconds.
  double idle_seconds = 60;
};

// Every process of the group calls this. The destructor waits some seconds for the other processes' messages to this
// one to end.
std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                               const C10dOptions& options = {});

// Throws Error unless the group has replicas x ranks processes. See make_process_world.
World make_c10d_world(c10::intrusive_ptr<c10d::ProcessGroup> group, int replicas, int ranks,
                      const C10dOptions& options = {});

}  // namespace twobp
