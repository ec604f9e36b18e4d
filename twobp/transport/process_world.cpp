#include "twobp/transport/process_world.h"

#include <exception>
#include <future>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/transport/subgroup.h"

namespace twobp {

void check_processes(int processes, int replicas, int ranks) {
  TWOBP_CHECK(replicas >= 1 && ranks >= 1, "a run needs at least one replica and one rank, got ", replicas,
              " replicas of ", ranks, " ranks");
  TWOBP_CHECK(processes == replicas * ranks, "the configuration makes ", replicas, " x ", ranks, " = ",
              replicas * ranks, " ranks (pipeline.data_parallel x ranks of a pipeline), but ", processes,
              processes == 1 ? " process was" : " processes were", " started: start ", replicas * ranks, " (mpirun -n ",
              replicas * ranks, ") or change the configuration");
}

namespace {

// Runs body(i) for each i < count at once. Rethrows the first error that is not an abort.
void at_once(int count, const std::function<void(int)>& body) {
  std::vector<std::future<void>> others;
  for (int i = 1; i < count; ++i) others.push_back(std::async(std::launch::async, body, i));
  std::exception_ptr error, aborted;
  const auto wait = [&](const auto& one) {
    try {
      one();
    } catch (const Aborted&) {
      if (!aborted) aborted = std::current_exception();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  };
  wait([&] { body(0); });
  for (auto& other : others) wait([&] { other.get(); });
  if (error) std::rethrow_exception(error);
  if (aborted) std::rethrow_exception(aborted);
}

}  // namespace

Ends::Ends(int count, const std::function<std::shared_ptr<Transport>(int)>& make) : ends_(count) {
  try {
    at_once(count, [&](int i) { ends_[i] = make(i); });
  } catch (...) {
    at_once(size(), [&](int i) { ends_[i].reset(); });
    throw;
  }
}

Ends::~Ends() {
  at_once(size(), [&](int i) { ends_[i].reset(); });
}

World make_process_world(std::shared_ptr<Ends> ends, int replicas, int ranks) {
  Transport& front = *(*ends)[0];
  check_processes(front.size(), replicas, ranks);
  World world;
  world.replicas = replicas;
  world.ranks = ranks;
  world.replica = front.rank() / ranks;
  world.all_local = ranks == 1;
  for (int i = 0; i < ends->size(); ++i) world.add_rank(*(*ends)[i]);
  std::vector<int> processes;
  for (int rank = 0; rank < replicas * ranks; rank += ends->size()) processes.push_back(rank);
  world.processes = std::make_unique<Subgroup>(front, processes, Group::kProcesses);
  // The copy outlives a world that an exception destroyed, because the other processes must still learn of the error.
  world.abort = [ends](const std::string& reason) {
    for (int i = 0; i < ends->size(); ++i) (*ends)[i]->abort(reason);
    const int own = (*ends)[0]->rank();
    const auto first = (*ends)[0]->first_failure();
    const bool here = !first || (first->rank >= own && first->rank < own + ends->size());
    return here ? std::string() : concat("rank ", own, " stopped: ", first->reason);
  };
  world.holds.push_back(std::move(ends));
  return world;
}

World make_process_world(std::shared_ptr<Transport> end, int replicas, int ranks) {
  return make_process_world(std::make_shared<Ends>(1, [&](int) { return std::move(end); }), replicas, ranks);
}

}  // namespace twobp
