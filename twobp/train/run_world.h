// Starts a training run in this process: finds out who started it and as which of how many, makes the world
// that pipeline.transport asks for, and runs the program in it.
#pragma once

#include <functional>

#include "twobp/train/config.h"
#include "twobp/transport/launcher.h"
#include "twobp/transport/world.h"

namespace twobp {

enum class TransportKind : uint8_t { kThreads, kMpi, kNccl };

// What pipeline.transport stands for under this launcher. Throws Error: several processes that are not to
// talk to each other, or one that is to talk to others; another number of processes than
// pipeline.data_parallel times the ranks of a pipeline.
TransportKind choose_transport(const PipelineConfig& config, const Launcher& launcher);

// Runs program(world): under a launcher in this process's world; without one for every replica, each on a
// thread, the first on the calling one. If it throws, all processes and replicas are aborted and this throws
// what was thrown first here. Throws Error as choose_transport, and if what it chose was not built in.
void run_world(const PipelineConfig& config, const Launcher& launcher,
               const std::function<void(World)>& program);

// For what only one process does. Throws Error if the launcher started several.
void check_alone(const char* command, const Launcher& launcher);

}  // namespace twobp
