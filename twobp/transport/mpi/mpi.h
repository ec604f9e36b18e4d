// Ranks as processes that an MPI launcher started (mpirun, srun). In a build without MPI, everything here throws.
#pragma once

#include <memory>

#include "twobp/transport/transport.h"
#include "twobp/transport/world.h"

namespace twobp {

struct MpiOptions {
  // Seconds for which a wait polls before it sleeps between polls, if every process has a core of its own. This is
  // longer than a large message takes within a machine.
  double spin_seconds = 5e-3;
  // The largest number of bytes in one MPI message.
  int64_t chunk_bytes = 64 << 20;
};

// Whether MPI was built in.
bool has_mpi();

// This process's part of a run of `replicas` x `ranks` processes, which all call this. Process p is rank p % ranks of
// replica p / ranks. Starts MPI. MPI is finalized when the program ends, unless a rank aborted. Throws Error if another
// number of processes was started.
World make_mpi_world(int replicas, int ranks, const MpiOptions& options = {});

// A transport among the first `ranks` processes only; null in the others. All processes call this in the same order.
std::unique_ptr<Transport> make_mpi_transport(int ranks, const MpiOptions& options = {});

// The number of processes that were started together, 1 without a launcher. Starts MPI.
int mpi_size();

// Whether MPI was started here and is not finalized yet.
bool mpi_is_running();

// Ends every process of the run at once, this one with exit code `code`. This is the last resort if a rank failed and
// the others do not answer. Ends only this process if MPI was never started.
[[noreturn]] void end_all(int code);

}  // namespace twobp
