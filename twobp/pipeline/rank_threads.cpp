#include "twobp/pipeline/rank_threads.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include "twobp/core/check.h"

namespace twobp {
namespace {

// The cores this process may use.
std::vector<int> usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

// The calling thread, and the compute threads it will start, on cores [first, first + count) of `cores`.
void pin_to(const std::vector<int>& cores, int first, int count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = first; i < first + count; ++i) CPU_SET(cores[i], &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

}  // namespace

struct RankThreads::State {
  std::mutex mutex;
  std::condition_variable posted;
  std::condition_variable finished;
  int64_t job = 0;
  int running = 0;
  bool stop = false;
  const std::function<void(int)>* body = nullptr;
  const std::function<void(const std::string&)>* on_error = nullptr;
  std::exception_ptr error;
  std::vector<std::thread> threads;

  void work(int rank) {
    int64_t seen = 0;
    while (true) {
      std::unique_lock lock(mutex);
      posted.wait(lock, [&] { return stop || job != seen; });
      if (stop) return;
      seen = job;
      lock.unlock();
      try {
        (*body)(rank);
      } catch (const std::exception& e) {
        report(std::current_exception(), e.what());
      } catch (...) {
        report(std::current_exception(), "unknown exception");
      }
      lock.lock();
      if (--running == 0) finished.notify_one();
    }
  }

  void report(std::exception_ptr what, const char* message) {
    {
      const std::lock_guard lock(mutex);
      if (error) return;
      error = std::move(what);
    }
    (*on_error)(message);
  }
};

bool RankThreads::enough_cores(int ranks, int threads_per_rank) {
  return static_cast<int>(usable_cores().size()) >= ranks * threads_per_rank;
}

RankThreads::RankThreads(int ranks, const ThreadOptions& options, const MemoryMeter& meter)
    : state_(std::make_unique<State>()) {
  const std::vector<int> cores = usable_cores();
  const int per_rank = options.threads_per_rank;
  TWOBP_CHECK(per_rank >= 1, "pipeline.threads must be at least 1, got ", per_rank);
  const bool pin = options.pin && static_cast<int>(cores.size()) >= ranks * per_rank;
  for (int rank = 0; rank < ranks; ++rank) {
    state_->threads.emplace_back([this, rank, cores, per_rank, pin, &meter] {
      if (pin) pin_to(cores, rank * per_rank, per_rank);
      at::set_num_threads(per_rank);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const MemoryMeter::Watch watch(meter);
      state_->work(rank);
    });
  }
}

RankThreads::~RankThreads() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->posted.notify_all();
  for (auto& thread : state_->threads) thread.join();
}

void RankThreads::run(const std::function<void(int)>& body,
                      const std::function<void(const std::string&)>& on_error) {
  std::unique_lock lock(state_->mutex);
  state_->body = &body;
  state_->on_error = &on_error;
  state_->error = nullptr;
  state_->running = static_cast<int>(state_->threads.size());
  ++state_->job;
  state_->posted.notify_all();
  state_->finished.wait(lock, [&] { return state_->running == 0; });
  if (state_->error) std::rethrow_exception(std::exchange(state_->error, nullptr));
}

}  // namespace twobp
