#include "twobp/transport/process_world.h"

#include "twobp/core/check.h"
#include "twobp/transport/subgroup.h"

namespace twobp {

void check_processes(int processes, int replicas, int ranks) {
  TWOBP_CHECK(replicas >= 1 && ranks >= 1, "a run of ", replicas, " x ", ranks, " ranks");
  TWOBP_CHECK(processes == replicas * ranks, "the configuration makes ", replicas, " x ", ranks, " = ",
              replicas * ranks, " ranks (pipeline.data_parallel x ranks of a pipeline), but ", processes,
              processes == 1 ? " process was" : " processes were", " started: start ", replicas * ranks,
              " (mpirun -n ", replicas * ranks, ") or change the configuration");
}

World make_process_world(std::shared_ptr<Transport> end, int replicas, int ranks) {
  const int size = end->size();
  check_processes(size, replicas, ranks);
  World world;
  world.replicas = replicas;
  world.ranks = ranks;
  world.replica = end->rank() / ranks;
  const int here = end->rank() % ranks;
  std::vector<int> of_replica, same_place, all;
  for (int rank = 0; rank < ranks; ++rank) of_replica.push_back(world.replica * ranks + rank);
  for (int replica = 0; replica < replicas; ++replica) same_place.push_back(replica * ranks + here);
  for (int process = 0; process < size; ++process) all.push_back(process);
  world.pipeline.resize(ranks);
  world.data.resize(ranks);
  world.pipeline[here] = std::make_unique<Subgroup>(*end, of_replica, Group::kPipeline);
  world.data[here] = std::make_unique<Subgroup>(*end, same_place, Group::kReplicas);
  world.processes = std::make_unique<Subgroup>(*end, all, Group::kProcesses);
  // The copy outlives a world that an exception destroyed, because the other processes must still learn of
  // the error.
  world.abort = [end](const std::string& reason) { end->abort(reason); };
  world.holds.push_back(std::move(end));
  return world;
}

}  // namespace twobp
