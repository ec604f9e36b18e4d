#include "twobp/transport/world.h"

#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/transport/subgroup.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp {

World::~World() {
  pipeline.clear();
  data.clear();
  run.clear();
  processes.reset();
}

void World::add_rank(Transport& end) {
  const int rank = end.rank() % ranks;
  std::vector<int> of_replica, same_place, all(replicas * ranks);
  std::iota(all.begin(), all.end(), 0);
  for (int r = 0; r < ranks; ++r) of_replica.push_back(replica * ranks + r);
  for (int r = 0; r < replicas; ++r) same_place.push_back(r * ranks + rank);
  pipeline.resize(ranks);
  data.resize(ranks);
  run.resize(ranks);
  pipeline[rank] = std::make_unique<Subgroup>(end, of_replica, Group::kPipeline);
  data[rank] = std::make_unique<Subgroup>(end, same_place, Group::kReplicas);
  run[rank] = std::make_unique<Subgroup>(end, std::move(all), Group::kRun);
}

std::vector<int> World::local_ranks() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < pipeline.size(); ++rank) {
    if (pipeline[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

namespace {

// Each process has `together` ranks of a pipeline.
std::vector<World> make_worlds(int replicas, int ranks, int together, double spin_seconds,
                               const std::vector<Device>& devices = {}) {
  TWOBP_CHECK(devices.empty() || std::cmp_equal(devices.size(), replicas * ranks), devices.size(), " devices for ",
              replicas, " pipelines of ", ranks, " ranks: one for each rank");
  // There is one network, so that an abort reaches every rank of every replica. Its last ranks are the processes.
  const int processes = replicas * ranks / together;
  std::vector<Device> of_ends = devices;
  if (!devices.empty()) of_ends.resize(replicas * ranks + processes);
  auto ends = std::make_shared<std::vector<std::unique_ptr<Transport>>>(
      make_in_process_transports(replicas * ranks + processes, spin_seconds, of_ends));
  std::vector<int> programs;
  for (int process = 0; process < processes; ++process) programs.push_back(replicas * ranks + process);
  std::vector<World> worlds(processes);
  for (int process = 0; process < processes; ++process) {
    World& world = worlds[process];
    world.replicas = replicas;
    world.replica = process * together / ranks;
    if (!devices.empty()) {
      const auto first = devices.begin() + std::ptrdiff_t{world.replica} * ranks;
      world.devices.assign(first, first + ranks);
    }
    world.ranks = ranks;
    world.all_local = together == ranks;
    world.holds.push_back(ends);
    world.abort = [ends](const std::string& reason) {
      ends->front()->abort(reason);
      return std::string();
    };
    for (int i = 0; i < together; ++i) world.add_rank(*(*ends)[process * together + i]);
    world.processes = std::make_unique<Subgroup>(*(*ends)[programs[process]], programs, Group::kProcesses);
  }
  return worlds;
}

}  // namespace

std::vector<World> make_in_process_worlds(int replicas, int ranks, double spin_seconds,
                                          const std::vector<Device>& devices) {
  return make_worlds(replicas, ranks, ranks, spin_seconds, devices);
}

std::vector<World> make_in_process_ranks(int replicas, int ranks, double spin_seconds) {
  return make_worlds(replicas, ranks, 1, spin_seconds);
}

void run_worlds(std::vector<World> worlds, const std::function<void(World)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::exception_ptr first_aborted;  // for causes that are not an exception of this process
  const auto run = [&](World world) {
    const auto abort = world.abort;
    std::string reason;
    try {
      body(std::move(world));
      return;
    } catch (const Aborted&) {
      const std::lock_guard lock(mutex);
      if (!first_aborted) first_aborted = std::current_exception();
      return;
    } catch (const std::exception& e) {
      reason = e.what();
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    } catch (...) {
      reason = "an exception of unknown type";
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    if (!abort) return;
    const std::string by_other = abort(reason);
    if (by_other.empty()) return;
    const std::lock_guard lock(mutex);
    first = nullptr;  // another process reports
    if (!first_aborted) first_aborted = std::make_exception_ptr(Aborted(by_other));
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < worlds.size(); ++i) {
    threads.emplace_back([&run, world = std::move(worlds[i])]() mutable { run(std::move(world)); });
  }
  run(std::move(worlds[0]));
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
  if (first_aborted) std::rethrow_exception(first_aborted);
}

}  // namespace twobp
