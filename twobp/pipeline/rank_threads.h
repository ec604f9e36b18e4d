// One thread for each rank, which lives as long as the pipeline. It is pinned to its own cores, has its own compute
// threads, no grad mode, and is watched by the memory meter.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/transport/transport.h"

namespace twobp {

struct ThreadOptions {
  int threads_per_rank = 1;
  bool pin = true;  // only if there are enough cores for all ranks
};

// This process's part of the cores that it may use. All processes that share these cores run `all` ranks, and this
// process's ranks begin with number `first`.
struct CoreShare {
  int first = 0;
  int all = 1;
  std::vector<int> clocks{};  // by process: the first one that reads the same clock
};
// Exchanges core sets and clocks with the other processes. Processes of one machine that may use the same cores share
// them. A launcher may instead give each process its own cores.
CoreShare share_cores(Transport& processes, int ranks_here, double timeout);

class RankThreads {
 public:
  // `ranks`: the ranks of this process.
  RankThreads(std::vector<int> ranks, const ThreadOptions& options, CoreShare share, const MemoryMeter& meter);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  class Profiler;

  // Work for every rank's thread. Each thread runs the jobs in the order in which they were submitted.
  struct Job {
    std::function<void(int rank)> body;
    // Called by the first rank that throws, before the others are waited for.
    std::function<void(const std::string&)> on_error;
    int running = 0;  // ranks that have not finished it
    std::shared_ptr<const Profiler> profiler{};
  };
  std::shared_ptr<Job> submit(std::function<void(int)> body, std::function<void(const std::string&)> on_error);
  // Waits until all ranks have done the job. After an error in any job, the remaining jobs are skipped, all ranks are
  // waited for, and the error is rethrown here.
  void wait(const Job& job);
  void run(std::function<void(int)> body, std::function<void(const std::string&)> on_error) {
    wait(*submit(std::move(body), std::move(on_error)));
  }

  // The seconds for which ranks of this process spin in a wait before they sleep. 0 if there are not enough cores for
  // every rank to have its own.
  static double spin_seconds(int ranks, int threads_per_rank);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace twobp
