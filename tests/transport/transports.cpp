// Makes rank threads of one process, with and without spinning waits, and as a group within a larger network.
#include "tests/transport/transports.h"

#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "twobp/transport/subgroup.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::test {
namespace {

using Ends = std::vector<std::unique_ptr<Transport>>;

void run_on_threads(Ends ends, const RankBody& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (auto& end : ends) {
    threads.emplace_back([&] {
      try {
        body(*end);
      } catch (...) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        end->abort("another rank of the test failed");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

void run_in_group(int ranks, const RankBody& body) {
  const Ends network = make_in_process_transports(ranks + 2, 0);
  std::vector<int> members(ranks);
  std::iota(members.begin(), members.end(), 0);
  Ends ends;
  for (int r = 0; r < ranks; ++r) {
    ends.push_back(std::make_unique<Subgroup>(*network[r], members, Group::kPipeline));
  }
  run_on_threads(std::move(ends), body);
}

}  // namespace

std::vector<World> worlds() {
  const auto run_with_spin = [](double seconds) {
    return [seconds](int ranks, const RankBody& body) {
      run_on_threads(make_in_process_transports(ranks, seconds), body);
    };
  };
  return {{"InProcess", run_with_spin(0)}, {"InProcessSpinning", run_with_spin(200e-6)}, {"Subgroup", run_in_group}};
}

}  // namespace twobp::test
