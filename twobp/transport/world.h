// All ranks of a run as one process sees them: which it runs itself, and whom these talk to.
//
// A run is `replicas` copies of a pipeline of `ranks` ranks. A process works for one replica, and runs all
// ranks of its pipeline as threads (one process, no launcher) or one of them (MPI, NCCL). Every process runs
// the same program on the same configuration; several replicas in one process are several such programs as
// threads.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "twobp/nn/device/device.h"
#include "twobp/transport/transport.h"

namespace twobp {

struct World {
  int replicas = 1;
  int replica = 0;  // this process's
  int ranks = 1;    // of a pipeline

  // By rank of the pipeline; null: another process runs it.
  std::vector<std::unique_ptr<Transport>> pipeline;  // between the ranks of this replica
  std::vector<std::unique_ptr<Transport>> data;      // between the replicas' ranks of this place, by replica
  // Where the ranks of this process compute, by rank of the pipeline; empty: on the CPU.
  std::vector<Device> devices;
  // Between processes, in the order of their first ranks; never null. For the thread that runs the program:
  // its ranks may be in a step meanwhile.
  std::unique_ptr<Transport> processes;

  // Makes the waits of every process throw Aborted. Any thread; a copy may be called once the world is gone.
  std::function<void(const std::string& reason)> abort;

  // What the endpoints above talk through; destroyed after them.
  std::vector<std::shared_ptr<void>> holds;

  World() = default;
  World(World&&) = default;
  World& operator=(World&&) = delete;
  ~World();

  int process() const { return processes->rank(); }
  int process_count() const { return processes->size(); }
  bool is_local(int rank) const { return pipeline[rank] != nullptr; }
  Device device(int rank) const { return devices.empty() ? Device() : devices.at(rank); }
  bool all_local() const;
  std::vector<int> local_ranks() const;
  // Of the processes of this replica, this one has rank 0.
  bool is_first_of_replica() const { return is_local(0); }
  int processes_of_replica() const { return process_count() / replicas; }
  // The process that shows and saves what is one for the run.
  bool is_first() const { return process() == 0; }
};

// Every replica's world in this process, to be run by a thread each. Waits spin for `spin_seconds`, see
// in_process.h. `devices`, by rank of the pipeline: of a single replica.
std::vector<World> make_in_process_worlds(int replicas, int ranks, double spin_seconds,
                                          const std::vector<Device>& devices = {});
// As a launcher has it, with a process for each rank of each replica, but in this process: a thread for each
// world, in order of the world's ranks.
std::vector<World> make_in_process_ranks(int replicas, int ranks, double spin_seconds);

// Runs body(world) on a thread for each world, the first on the calling one. What one throws aborts the
// others; rethrows the first that was not thrown because of that.
void run_worlds(std::vector<World> worlds, const std::function<void(World)>& body);

}  // namespace twobp
