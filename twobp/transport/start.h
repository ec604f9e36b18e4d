// How the processes of a run start: which launcher started this one, and the world that it makes of the endpoints of
// its ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "twobp/transport/world.h"

namespace twobp {

struct Launcher {
  enum class Kind {
    kNone,      // started by itself
    kMpi,       // mpirun, mpiexec, or srun through PMI
    kSlurm,     // srun
    kTorchrun,  // torchrun, or another program that sets RANK and WORLD_SIZE
  };

  Kind kind = Kind::kNone;
  int rank = 0;
  int size = 1;
  // Among the processes of this machine. Equal to `rank` if the launcher does not say.
  int local_rank = 0;
  std::string master_address;  // address of rank 0; empty: unknown
  int master_port = 0;         // 0: unknown

  bool started_many() const { return size > 1; }
};

// A name for messages: "mpirun", "srun", "torchrun", "no launcher".
const char* name_of(Launcher::Kind kind);

// Returns the value of an environment variable, or null.
using Environment = std::function<const char*(const char* name)>;

// Reads Open MPI's OMPI_COMM_WORLD_*, PMI's PMI_RANK and PMI_SIZE (MPICH, Intel MPI; local ranks by MPI_LOCALRANKID),
// MVAPICH's MV2_COMM_WORLD_*, torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and the variables
// of a Slurm job step (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; a batch script alone is not a step). If one
// launcher starts another, the inner one counts. Throws Error that names the variable if one is missing or invalid.
Launcher find_launcher(const Environment& environment);
Launcher find_launcher();

// Makes the world of a process from the endpoints of its ranks among all ranks of the run.

// Throws Error unless `processes` equals replicas x ranks.
void check_processes(int processes, int replicas, int ranks);

// The endpoints of one process's ranks. They wait for each other when they are made and when they are destroyed, so
// each of them does that on a thread of its own.
class Ends {
 public:
  // make(i) for each i < count. Rethrows the first error that is not an abort.
  Ends(int count, const std::function<std::shared_ptr<Transport>(int i)>& make);
  ~Ends();
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  int size() const { return static_cast<int>(ends_.size()); }
  const std::shared_ptr<Transport>& operator[](int i) const { return ends_[i]; }

 private:
  std::vector<std::shared_ptr<Transport>> ends_;
};

// Endpoint e of the run is rank e % ranks of replica e / ranks. `ends` are those of this process, which come one after
// the other and belong to one replica; every process has as many. Throws Error if the run has another number of ranks.
World make_process_world(std::shared_ptr<Ends> ends, int replicas, int ranks);
// A process of one rank.
World make_process_world(std::shared_ptr<Transport> end, int replicas, int ranks);

// What a start needs of the run: keys of the section `pipeline`, and its shape.
struct StartOptions {
  std::string transport = "auto";
  std::string device = "cpu";
  std::string sums = "auto";
  bool graphs = false;
  bool gpu_parts = false;
  int data_parallel = 1;
  int ranks = 1;                   // of a pipeline
  std::vector<int> rank_of_stage;  // between which NCCL connects
  double timeout = 300;
  double spin_seconds = 0;  // of waits between threads (in_process.h)
};

// Whether replicas that are connected by NCCL sum gradients by its own sums (pipeline.sums).
bool sums_by_nccl(const StartOptions& options);

enum class TransportKind : uint8_t {
  kThreads,
  kMpi,
  kStore,  // on CPUs, through torchrun's store
  kNccl,   // on GPUs
};

// The meaning of pipeline.transport under this launcher. Throws Error if there are several processes and the transport
// is for one, or the reverse. Also throws Error if the number of processes is not pipeline.data_parallel times the
// ranks of a pipeline; on GPUs, a process may have several ranks.
TransportKind choose_transport(const StartOptions& options, const Launcher& launcher);

// Runs program(world). Under a launcher, this is in the process's world. Without one, each replica has a thread; the
// first replica runs on the calling thread. If the program throws, all processes and replicas are aborted, and the
// first error in this process is rethrown. Throws Error as choose_transport does, and if the chosen transport was not
// built in.
void run_world(const StartOptions& options, const Launcher& launcher, const std::function<void(World)>& program);

// For commands that only one process runs. Throws Error if the launcher started several processes.
void check_alone(const char* command, const Launcher& launcher);

// The world of a process whose ranks compute on GPUs and talk to other processes by NCCL.

// Ranks of each process: all of them, shared out evenly. Throws Error if that does not come out even, or if a process
// would have ranks of several replicas.
int ranks_of_process(const StartOptions& options, int processes);

// Processes that mpirun started connect through MPI, others at MASTER_ADDR. They compare their GPUs first. If one of
// them cannot compute, has no NCCL, or has a GPU of another model, or if two ranks are on one GPU, this throws the same
// Error on all.
World make_gpu_world(const StartOptions& options, const Launcher& launcher);

// The same for processes that are connected already. `hosts` are the endpoints of this process's ranks, which nothing
// else uses afterwards.
struct GpuProcess {
  int count = 1;       // of all processes
  int local_rank = 0;  // among those of its machine
};
World make_gpu_world(const StartOptions& options, const GpuProcess& process, const Ends& hosts);

}  // namespace twobp
