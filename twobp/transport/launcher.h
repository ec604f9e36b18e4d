// Who started this process, as which of how many: read from the environment that launchers set.
#pragma once

#include <functional>
#include <string>

namespace twobp {

struct Launcher {
  enum class Kind {
    kNone,      // started by itself
    kMpi,       // mpirun, mpiexec, or srun through PMI
    kSlurm,     // srun
    kTorchrun,  // torchrun, or anything else that sets RANK and WORLD_SIZE
  };

  Kind kind = Kind::kNone;
  int rank = 0;
  int size = 1;
  int local_rank = 0;          // among the processes of this machine; `rank` where the launcher doesn't say
  std::string master_address;  // where rank 0 can be reached; empty: not said
  int master_port = 0;         // 0: not said

  bool started_many() const { return size > 1; }
};

// For messages: "mpirun", "srun", "torchrun", "no launcher".
const char* name_of(Launcher::Kind kind);

// The value of a variable of the environment, or null.
using Environment = std::function<const char*(const char* name)>;

// Reads Open MPI's OMPI_COMM_WORLD_*, PMI's PMI_RANK and PMI_SIZE (MPICH, Intel MPI; local ranks by
// MPI_LOCALRANKID), MVAPICH's MV2_COMM_WORLD_*, torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
// MASTER_PORT, and those of a Slurm job step (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; a batch
// script alone is no step). Where one launcher starts another, the inner one counts. Throws Error that names
// the variable if one is missing or makes no sense.
Launcher find_launcher(const Environment& environment);
Launcher find_launcher();

}  // namespace twobp
