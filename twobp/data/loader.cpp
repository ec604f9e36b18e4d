// The loader. Its threads each read one micro-batch at a time, of at most `read_ahead` batches. Batches are returned in
// order, whichever threads read them. next() rethrows a thread's exception in place of its batch.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/wait.h"
#include "twobp/data/balance.h"
#include "twobp/data/data.h"

namespace twobp {
namespace {

// Decoding pictures uses only the time that ranks leave. When the ranks wait for a batch, that is all of it.
constexpr int kNice = 10;

}  // namespace

struct Loader::Impl {
  // A batch that is being read.
  struct Pending {
    int64_t epoch = 0;
    std::vector<std::vector<int64_t>> indices;  // of each micro-batch
    std::vector<Fields> micro_batches;
    std::vector<std::exception_ptr> errors;  // of each micro-batch
    size_t taken = 0;                        // micro-batches that a thread has started
    size_t done = 0;

    bool complete() const { return done == indices.size(); }
  };

  std::shared_ptr<const Dataset> dataset;
  int64_t samples_per_batch = 1;  // of all replicas
  int64_t micro_batch_size = 1;
  LoaderOptions options;

  std::mutex mutex;                              // guards the members below
  std::condition_variable changed;               // a batch was added or removed, or stop was set
  std::deque<std::shared_ptr<Pending>> batches;  // in order
  bool failed = false;                           // no batch follows these
  bool stop = false;
  int64_t epoch = 0;  // of the next batch to start
  int64_t from = 0;   // index in `order` of its first sample
  std::vector<int64_t> order;

  std::vector<std::thread> threads;

  class Arrival;

  int64_t batches_per_epoch() const { return (dataset->size() + samples_per_batch - 1) / samples_per_batch; }

  void begin_epoch() {
    order = options.evaluation ? epoch_order(dataset->size(), false, 0, 0)
                               : epoch_order(dataset->size(), options.shuffle, options.seed, epoch);
  }

  // Orders the samples of the full batch that begins here by what they cost.
  void balance(int64_t begin) {
    const std::vector<int64_t> samples(order.begin() + begin, order.begin() + begin + samples_per_batch);
    const int64_t micro_batches = samples_per_batch / options.replicas / micro_batch_size;
    const auto balanced = balanced_samples(*dataset, samples, options.replicas, micro_batches, micro_batch_size);
    std::copy(balanced.begin(), balanced.end(), order.begin() + begin);
  }

  void begin_batch() {
    if (from >= static_cast<int64_t>(order.size())) {
      ++epoch;
      from = 0;
      begin_epoch();
    }
    auto batch = std::make_shared<Pending>();
    batch->epoch = options.evaluation ? kEvaluation : epoch;
    const int64_t end = std::min<int64_t>(from + samples_per_batch, static_cast<int64_t>(order.size()));
    if (end - from == samples_per_batch && !options.evaluation) balance(from);
    const int64_t share = samples_per_batch / options.replicas;
    const int64_t share_end = std::min(from + (options.replica + 1) * share, end);
    for (int64_t at = std::min(from + options.replica * share, end); at < share_end;) {
      const int64_t to = std::min(at + micro_batch_size, share_end);
      batch->indices.emplace_back(order.begin() + at, order.begin() + to);
      at = to;
    }
    from = end;
    batch->micro_batches.resize(batch->indices.size());
    batch->errors.resize(batch->indices.size());
    batches.push_back(std::move(batch));
  }

  // A batch with a micro-batch that is not yet being read. Starts a batch if necessary. Returns null if the queue is
  // full.
  std::shared_ptr<Pending> find_work() {
    for (const auto& batch : batches) {
      if (batch->taken < batch->indices.size()) return batch;
    }
    while (!failed && std::cmp_less(batches.size(), options.read_ahead)) {
      begin_batch();
      if (!batches.back()->complete()) return batches.back();
      changed.notify_all();  // the replica has no share of this batch
    }
    return nullptr;
  }

  void run() {
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kNice);  // of this thread, on Linux
    std::unique_lock lock(mutex);
    while (true) {
      std::shared_ptr<Pending> batch;
      changed.wait(lock, [&] { return stop || (batch = find_work()); });
      if (stop) return;
      const size_t index = batch->taken++;
      lock.unlock();
      Fields fields;
      std::exception_ptr error;
      try {
        fields = dataset->read(batch->indices[index], batch->epoch);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      batch->micro_batches[index] = std::move(fields);
      batch->errors[index] = error;
      ++batch->done;
      failed = failed || error;
      if (batch->complete()) changed.notify_all();
    }
  }
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, int64_t micro_batches, int64_t micro_batch_size,
               const LoaderOptions& options)
    : impl_(std::make_unique<Impl>()) {
  TWOBP_CHECK(dataset && dataset->size() > 0, "loader: there is no sample to read.");
  TWOBP_CHECK(micro_batches >= 1 && micro_batch_size >= 1 && options.read_ahead >= 1, "loader: ", micro_batches,
              " micro-batches of ", micro_batch_size, " samples, ", options.read_ahead,
              " batches ahead: each must be 1 or more.");
  TWOBP_CHECK(options.workers >= 1, "loader: ", options.workers, " threads: there must be 1 or more.");
  TWOBP_CHECK(options.first_batch >= 0, "loader: there is no batch ", options.first_batch, ".");
  impl_->dataset = std::move(dataset);
  TWOBP_CHECK(options.replica >= 0 && options.replica < options.replicas, "loader: replica ", options.replica, " of ",
              options.replicas, ".");
  impl_->samples_per_batch = options.replicas * micro_batches * micro_batch_size;
  impl_->micro_batch_size = micro_batch_size;
  impl_->options = options;
  impl_->epoch = options.first_batch / impl_->batches_per_epoch();
  impl_->from = options.first_batch % impl_->batches_per_epoch() * impl_->samples_per_batch;
  impl_->begin_epoch();
  for (int i = 0; i < options.workers; ++i) impl_->threads.emplace_back([impl = impl_.get()] { impl->run(); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->changed.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
}

// Of the next batch, unless `stop` returns true before.
class Loader::Impl::Arrival : public Wait {
 public:
  Arrival(Impl& loader, const std::function<bool()>& stop) : loader_(loader), stop_(stop) {}
  bool there() {
    const std::lock_guard lock(loader_.mutex);
    return !loader_.batches.empty() && loader_.batches.front()->complete();
  }
  WaitCause cause() const override { return WaitCause::kInput; }
  bool ready() override { return there() || (stop_ && stop_()); }
  void block(double seconds) override {
    std::unique_lock lock(loader_.mutex);
    const bool complete = !loader_.batches.empty() && loader_.batches.front()->complete();
    if (!complete) loader_.changed.wait_for(lock, std::chrono::duration<double>(std::min(seconds, kLongestSleep)));
  }
  [[noreturn]] void fail(double timeout) const override {
    twobp::fail("waited ", timeout, " s for a batch of the data: the files cannot be reached, or reading takes longer ",
                "than the time-out: check the files, raise data.workers, or raise pipeline.timeout");
  }

 private:
  Impl& loader_;
  const std::function<bool()>& stop_;
};

bool Loader::wait(const std::function<bool()>& stop) {
  Impl::Arrival batch(*impl_, stop);
  const double timeout = impl_->options.timeout;
  wait_for(batch, timeout == 0 ? std::numeric_limits<double>::infinity() : timeout);
  return batch.there();
}

Batch Loader::next() {
  wait();
  std::unique_lock lock(impl_->mutex);
  const std::shared_ptr<Impl::Pending> batch = impl_->batches.front();
  for (const auto& error : batch->errors) {
    if (error) std::rethrow_exception(error);  // the batch stays, so that later calls get the same error
  }
  impl_->batches.pop_front();
  lock.unlock();
  impl_->changed.notify_all();
  return make_batch(std::move(batch->micro_batches), impl_->options.count_targets);
}

int64_t Loader::batches_per_epoch() const {
  return impl_->batches_per_epoch();
}

}  // namespace twobp
