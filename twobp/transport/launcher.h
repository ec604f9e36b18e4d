// Finds out which launcher started this process, and the process's rank and count, from the environment that launchers
// set.
#pragma once

#include <functional>
#include <string>

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

}  // namespace twobp
