// The world of a process whose ranks compute on GPUs and talk to other processes by NCCL.
#pragma once

#include "twobp/pipeline/pipeline_config.h"
#include "twobp/transport/start.h"
#include "twobp/transport/world.h"

namespace twobp {

// Ranks of each process: all of them, shared out evenly. Throws Error if that does not come out even, or if a process
// would have ranks of several replicas.
int ranks_of_process(const PipelineConfig& config, int ranks, int processes);

// Processes that mpirun started connect through MPI, others at MASTER_ADDR. They compare their GPUs first. If one of
// them cannot compute, has no NCCL, or has a GPU of another model, or if two ranks are on one GPU, this throws the same
// Error on all.
World make_gpu_world(const PipelineConfig& config, const Launcher& launcher, int ranks);

// The same for processes that are connected already. `hosts` are the endpoints of this process's ranks, which nothing
// else uses afterwards.
struct GpuProcess {
  int count = 1;       // of all processes
  int local_rank = 0;  // among those of its machine
};
World make_gpu_world(const PipelineConfig& config, const GpuProcess& process, int ranks, const Ends& hosts);

}  // namespace twobp
