// Ranks as processes that an MPI launcher started (mpirun, srun). Built without MPI, everything here throws.
#pragma once

#include <memory>

#include "twobp/transport/transport.h"
#include "twobp/transport/world.h"

namespace twobp {

struct MpiOptions {
  // Seconds that a wait looks again and again before it sleeps in between, where every process has a core of
  // its own: longer than a large message takes within a machine.
  double spin_seconds = 5e-3;
  // The most bytes that one MPI message carries.
  int64_t chunk_bytes = 64 << 20;
};

// Whether MPI was built in.
bool has_mpi();

// This process's part of a run of `replicas` x `ranks` processes, which all call it. World rank of process
// p: replica p / ranks, rank p % ranks. Starts MPI; it is finished when the program ends, unless a rank
// aborted. Throws Error if another number of processes was started.
World make_mpi_world(int replicas, int ranks, const MpiOptions& options = {});

// Only messages among the first `ranks` processes; null in the others. All processes call it, in one order.
std::unique_ptr<Transport> make_mpi_transport(int ranks, const MpiOptions& options = {});

// Processes that were started together, 1 without a launcher. Starts MPI.
int mpi_size();

// Ends every process of the run at once, this one with exit code `code`: the last resort when a rank failed
// and the others don't answer. Only this process if MPI was never started.
[[noreturn]] void end_all(int code);

}  // namespace twobp
