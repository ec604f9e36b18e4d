// Rank threads of one process; with spinning waits and without.
#include "tests/transport/transports.h"

#include <exception>
#include <mutex>
#include <thread>

#include "twobp/transport/in_process.h"

namespace twobp::test {
namespace {

void run_on_threads(int ranks, double spin_seconds, const RankBody& body) {
  auto transports = make_in_process_transports(ranks, spin_seconds);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (auto& transport : transports) {
    threads.emplace_back([&] {
      try {
        body(*transport);
      } catch (...) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        transport->abort("another rank of the test failed");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace

std::vector<World> worlds() {
  return {
      {"InProcess", [](int ranks, const RankBody& body) { run_on_threads(ranks, 0, body); }},
      {"InProcessSpinning", [](int ranks, const RankBody& body) { run_on_threads(ranks, 200e-6, body); }}};
}

}  // namespace twobp::test
