// How the processes of a run start: which launcher started this one, and the world that it makes of the endpoints of
// its ranks.
#pragma once

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

}  // namespace twobp
