// One thread per rank that lives as long as the pipeline: pinned to cores of its own, with its own number of
// compute threads, without grad mode, watched by the memory meter.
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

// Which of the cores that this process may use are its ranks': those of the `first` rank and on, of `all`
// ranks that these cores are for, of other processes too.
struct CoreShare {
  int first = 0;
  int all = 1;
};
// What every process of a machine says about its cores; all that may use the same cores share them, unless a
// launcher gave each its own.
CoreShare share_cores(Transport& processes, int ranks_here, double timeout);

class RankThreads {
 public:
  // `ranks`: those that this process runs.
  RankThreads(std::vector<int> ranks, const ThreadOptions& options, CoreShare share,
              const MemoryMeter& meter);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // What every rank's thread is to do, each when it has done the jobs before.
  struct Job {
    std::function<void(int rank)> body;
    // Called by the first rank that throws, before the others are waited for.
    std::function<void(const std::string&)> on_error;
    int running = 0;  // ranks that have not done it
  };
  std::shared_ptr<Job> submit(std::function<void(int)> body,
                              std::function<void(const std::string&)> on_error);
  // Until all ranks have done the job. After an error, of this job or one before or behind it, the jobs that
  // are left are passed over, all ranks are waited for, and it is rethrown here.
  void wait(const Job& job);
  void run(std::function<void(int)> body, std::function<void(const std::string&)> on_error) {
    wait(*submit(std::move(body), std::move(on_error)));
  }

  // True if every rank has cores of its own.
  static bool enough_cores(int ranks, int threads_per_rank);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace twobp
