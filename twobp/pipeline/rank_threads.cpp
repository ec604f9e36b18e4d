#include "twobp/pipeline/rank_threads.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/pipeline/memory/block_cache.h"
#include "twobp/transport/collectives.h"

namespace twobp {
namespace {

// Longer than a wake-up takes, and shorter than a layer.
constexpr double kSpinSeconds = 200e-6;

// The cores that this process may use.
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

// Differs between machines and is the same for all processes of one machine.
std::string machine_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

// Differs between monotonic clocks: those of machines, and of containers that were given a time of their own.
std::string clock_id() {
  std::error_code none;
  return machine_id() + std::filesystem::read_symlink("/proc/self/ns/time", none).string();
}

int64_t number_of(const std::string& id) {
  return static_cast<int64_t>(Hash().add(id).value());
}

// Pins the calling thread, and the compute threads that it will start, to cores [first, first + count) of `cores`.
void pin_to(const std::vector<int>& cores, int first, int count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = first; i < first + count; ++i) CPU_SET(cores[i], &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

}  // namespace

// The profiler of torch that records the thread which submits a job: it records what the ranks do for the job, too.
class RankThreads::Profiler {
 public:
  // Of the calling thread. Null: none.
  static std::shared_ptr<const Profiler> here() {
    const at::RecordFunctionTLS& callbacks = at::get_record_function_tls_();
    return callbacks.sorted_tls_callbacks_.empty() ? nullptr : std::make_shared<const Profiler>();
  }

  void run(const MemoryMeter& meter, const std::function<void()>& work) const {
    const Profiler before;
    install();
    try {
      const MemoryMeter::Watch watch(meter);
      work();
    } catch (...) {
      before.install();
      throw;
    }
    before.install();
  }

 private:
  void install() const {
    at::set_record_function_tls_(callbacks_);
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(state_);
  }

  at::RecordFunctionTLS callbacks_ = at::get_record_function_tls_();
  std::shared_ptr<c10::ThreadLocalDebugInfo> state_ = c10::ThreadLocalDebugInfo::current();
};

struct RankThreads::State {
  explicit State(const MemoryMeter& meter) : meter(meter) {}

  const MemoryMeter& meter;
  std::mutex mutex;
  std::condition_variable posted;
  std::condition_variable finished;
  std::deque<std::shared_ptr<Job>> jobs;  // beginning with the oldest that some rank has not finished
  int64_t first = 0;                      // the number of that job
  bool stop = false;
  std::exception_ptr error;
  std::vector<std::thread> threads;

  void work(int rank) {
    for (int64_t number = 0; true; ++number) {
      std::unique_lock lock(mutex);
      posted.wait(lock, [&] { return stop || number < first + static_cast<int64_t>(jobs.size()); });
      if (stop) return;
      const std::shared_ptr<Job> job = jobs[number - first];
      const bool passed_over = error != nullptr;
      lock.unlock();
      if (!passed_over) run(*job, rank);
      lock.lock();
      --job->running;
      while (!jobs.empty() && jobs.front()->running == 0) {
        jobs.pop_front();
        ++first;
      }
      finished.notify_all();
    }
  }

  void run(const Job& job, int rank) {
    try {
      job.profiler ? job.profiler->run(meter, [&] { job.body(rank); }) : job.body(rank);
    } catch (const std::exception& e) {
      report(job, std::current_exception(), e.what());
    } catch (...) {
      report(job, std::current_exception(), "unknown exception");
    }
  }

  void report(const Job& job, std::exception_ptr what, const char* message) {
    {
      const std::lock_guard lock(mutex);
      if (error) return;
      error = std::move(what);
    }
    job.on_error(message);
  }
};

double RankThreads::spin_seconds(int ranks, int threads_per_rank) {
  return static_cast<int>(usable_cores().size()) >= ranks * threads_per_rank ? kSpinSeconds : 0;
}

CoreShare share_cores(Transport& processes, int ranks_here, double timeout) {
  // Processes of one machine share cores if their core sets are equal. A launcher that gave each process its own cores
  // made the sets different.
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  constexpr int64_t kWords = sizeof(set) / sizeof(int64_t);
  at::Tensor mine = at::zeros({3 + kWords}, at::kLong);
  int64_t* words = mine.mutable_data_ptr<int64_t>();
  words[0] = ranks_here;
  words[1] = number_of(clock_id());
  words[2] = number_of(machine_id());
  std::memcpy(words + 3, &set, kWords * sizeof(int64_t));
  at::Tensor all = at::zeros({processes.size(), 3 + kWords}, at::kLong);
  all[processes.rank()].copy_(mine);
  sum_on_the_way(processes, all, timeout);
  CoreShare share{0, 0};
  std::map<int64_t, int> first_with;  // by clock
  for (int process = 0; process < processes.size(); ++process) {
    const at::Tensor row = all[process];
    share.clocks.push_back(first_with.try_emplace(row.const_data_ptr<int64_t>()[1], process).first->second);
    if (!at::equal(row.narrow(0, 2, 1 + kWords), mine.narrow(0, 2, 1 + kWords))) continue;
    const auto ranks = static_cast<int>(row.const_data_ptr<int64_t>()[0]);
    if (process < processes.rank()) share.first += ranks;
    share.all += ranks;
  }
  return share;
}

RankThreads::RankThreads(std::vector<int> ranks, const ThreadOptions& options, CoreShare share,
                         const MemoryMeter& meter)
    : state_(std::make_unique<State>(meter)) {
  const std::vector<int> cores = usable_cores();
  BlockCache::install();
  const int per_rank = options.threads_per_rank;
  TWOBP_CHECK(per_rank >= 1, "pipeline.threads must be at least 1, got ", per_rank);
  const bool pin = options.pin && static_cast<int>(cores.size()) >= share.all * per_rank;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int first_core = (share.first + static_cast<int>(i)) * per_rank;
    state_->threads.emplace_back([this, rank = ranks[i], first_core, cores, per_rank, pin, &meter] {
      if (pin) pin_to(cores, first_core, per_rank);
      // A thread's first look at this number replaces it by the one that any thread has set last. A shared library,
      // such as Python's, remembers apart from LibTorch whether it has looked.
      at::get_num_threads();
      at::internal::lazy_init_num_threads();
      at::set_num_threads(per_rank);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const BlockCache::Use blocks;
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

std::shared_ptr<RankThreads::Job> RankThreads::submit(std::function<void(int)> body,
                                                      std::function<void(const std::string&)> on_error) {
  auto job = std::make_shared<Job>(
      Job{std::move(body), std::move(on_error), static_cast<int>(state_->threads.size()), Profiler::here()});
  {
    const std::lock_guard lock(state_->mutex);
    state_->jobs.push_back(job);
  }
  state_->posted.notify_all();
  return job;
}

void RankThreads::wait(const Job& job) {
  std::unique_lock lock(state_->mutex);
  state_->finished.wait(lock, [&] { return state_->error ? state_->jobs.empty() : job.running == 0; });
  if (state_->error) std::rethrow_exception(std::exchange(state_->error, nullptr));
}

}  // namespace twobp
