// Makes the world of a process that runs one rank from an endpoint among all processes of the run.
#pragma once

#include <memory>

#include "twobp/transport/world.h"

namespace twobp {

// Throws Error unless `processes` equals replicas x ranks.
void check_processes(int processes, int replicas, int ranks);

// Process p is rank p % ranks of replica p / ranks. Throws Error if the endpoint has another number of
// processes.
World make_process_world(std::shared_ptr<Transport> end, int replicas, int ranks);

}  // namespace twobp
