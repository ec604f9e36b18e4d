// Starts a training run in this process. It finds the launcher and this process's place in the run, makes the world
// that pipeline.transport asks for, and runs the program in it.
#pragma once

#include <functional>

#include "twobp/pipeline/pipeline_config.h"
#include "twobp/transport/world.h"

namespace twobp {

struct Launcher;

enum class TransportKind : uint8_t {
  kThreads,
  kMpi,
  kStore,  // on CPUs, through torchrun's store
  kNccl,   // on GPUs
};

// The meaning of pipeline.transport under this launcher. Throws Error if there are several processes and the transport
// is for one, or the reverse. Also throws Error if the number of processes is not pipeline.data_parallel times the
// ranks of a pipeline; on GPUs, a process may have several ranks.
TransportKind choose_transport(const PipelineConfig& config, const Launcher& launcher);

// Runs program(world). Under a launcher, this is in the process's world. Without one, each replica has a thread; the
// first replica runs on the calling thread. If the program throws, all processes and replicas are aborted, and the
// first error in this process is rethrown. Throws Error as choose_transport does, and if the chosen transport was not
// built in.
void run_world(const PipelineConfig& config, const Launcher& launcher, const std::function<void(World)>& program);
// The same under the launcher that started this process.
void run_world(const PipelineConfig& config, const std::function<void(World)>& program);

// For commands that only one process runs. Throws Error if the launcher started several processes.
void check_alone(const char* command, const Launcher& launcher);

}  // namespace twobp
