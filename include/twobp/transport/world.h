// All ranks of a run as seen by one process: the ranks that it runs itself, and their connections.
//
// A run is `replicas` copies of a pipeline of `ranks` ranks. A process works for one replica. It runs all ranks of its
// pipeline as threads (one process, no launcher), or one of them, or with NCCL several. Every process runs the same
// program on the same configuration. Several replicas in one process are several such programs, run as threads.
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
  int replica = 0;  // of this process
  int ranks = 1;    // of a pipeline

  // By rank of the pipeline. Null if another process runs the rank.
  std::vector<std::unique_ptr<Transport>> pipeline;  // between the ranks of this replica
  std::vector<std::unique_ptr<Transport>> data;      // between the same rank of all replicas, by replica
  std::vector<std::unique_ptr<Transport>> run;       // between all ranks of all replicas
  // Whether all ranks of the pipeline are in this process and hand their tensors to each other. Ranks of a process may
  // also send them by NCCL.
  bool all_local = false;
  // The devices of this process's ranks, by rank of the pipeline; those of other ranks are CPUs. Empty if all ranks
  // compute on CPUs.
  std::vector<Device> devices;
  // Between processes, in the order of their first ranks; never null. For the thread that runs the program, which may
  // use it while its ranks are in a step.
  std::unique_ptr<Transport> processes;

  // Makes the waits of every process throw Aborted. May be called from any thread. A copy may be called after the world
  // is destroyed. Returns what Aborted says if another process failed first, which then reports instead of this one;
  // otherwise nothing.
  std::function<std::string(const std::string& reason)> abort;

  // Objects that the endpoints above use. They are destroyed after the endpoints.
  std::vector<std::shared_ptr<void>> holds;

  World() = default;
  World(World&&) = default;
  World& operator=(World&&) = delete;
  ~World();

  // Gives this process the rank of `end`, an endpoint in the network of all ranks of the run: each replica's follow
  // those of the replica before. `replicas`, `replica` and `ranks` are set.
  void add_rank(Transport& end);

  int process() const { return processes->rank(); }
  int process_count() const { return processes->size(); }
  bool is_local(int rank) const { return pipeline[rank] != nullptr; }
  Device device(int rank) const { return devices.empty() ? Device() : devices.at(rank); }
  std::vector<int> local_ranks() const;
  // Whether this process has rank 0 of its replica.
  bool is_first_of_replica() const { return is_local(0); }
  int processes_of_replica() const { return process_count() / replicas; }
  // Whether this is the process that prints and saves on behalf of the run.
  bool is_first() const { return process() == 0; }
};

// The worlds of all replicas in this process. Each is run by a thread. Waits spin for `spin_seconds` (see
// in_process.h). `devices` has those of all ranks of the first replica, then those of the next.
std::vector<World> make_in_process_worlds(int replicas, int ranks, double spin_seconds,
                                          const std::vector<Device>& devices = {});
// As under a launcher with a process for each rank of each replica, but within this process: one thread for each world,
// in order of the worlds' ranks.
std::vector<World> make_in_process_ranks(int replicas, int ranks, double spin_seconds);

// Runs body(world) on a thread for each world; the first runs on the calling thread. An exception aborts the other
// worlds. Rethrows the first exception that is not a result of an abort. If another process failed first, throws
// Aborted.
void run_worlds(std::vector<World> worlds, const std::function<void(World)>& body);

}  // namespace twobp
