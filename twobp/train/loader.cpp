// The loader: one thread, a queue of at most `read_ahead` batches, and whatever the thread threw handed to
// next().
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/train/data.h"

namespace twobp {

struct Loader::Impl {
  std::shared_ptr<const Dataset> dataset;
  int64_t samples_per_batch = 1;
  int64_t micro_batch_size = 1;
  bool shuffle = false;
  uint64_t seed = 0;
  size_t read_ahead = 1;

  std::mutex mutex;                 // guards what follows
  std::condition_variable changed;  // a batch came or went, an error came, stop was set
  std::deque<Batch> ready;
  std::exception_ptr error;
  bool stop = false;

  std::thread thread;

  // Blocks until the queue has room; false to stop.
  bool wait_for_room() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return stop || ready.size() < read_ahead; });
    return !stop;
  }

  // Reads one epoch from its sample number `from` on; false to stop.
  bool read_epoch(int64_t epoch, int64_t from) {
    const std::vector<int64_t> order = epoch_order(dataset->size(), shuffle, seed, epoch);
    for (auto begin = order.begin() + from; begin != order.end();) {
      if (!wait_for_room()) return false;
      const auto end = begin + std::min<int64_t>(samples_per_batch, order.end() - begin);
      Batch batch = read_batch(*dataset, {begin, end}, micro_batch_size);
      begin = end;
      const std::lock_guard lock(mutex);
      ready.push_back(std::move(batch));
      changed.notify_all();
    }
    return true;
  }

  int64_t batches_per_epoch() const { return (dataset->size() + samples_per_batch - 1) / samples_per_batch; }

  void run(int64_t first_batch) {
    try {
      int64_t epoch = first_batch / batches_per_epoch();
      int64_t from = first_batch % batches_per_epoch() * samples_per_batch;
      for (; read_epoch(epoch, from); ++epoch) from = 0;
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = std::current_exception();
      changed.notify_all();
    }
  }
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, int64_t micro_batches, int64_t micro_batch_size,
               bool shuffle, uint64_t seed, int64_t read_ahead, int64_t first_batch)
    : impl_(std::make_unique<Impl>()) {
  TWOBP_CHECK(dataset && dataset->size() > 0, "loader: there is no sample to read.");
  TWOBP_CHECK(micro_batches >= 1 && micro_batch_size >= 1 && read_ahead >= 1, "loader: ", micro_batches,
              " micro-batches of ", micro_batch_size, " samples, ", read_ahead,
              " batches ahead: each must be 1 or more.");
  TWOBP_CHECK(first_batch >= 0, "loader: there is no batch ", first_batch, ".");
  impl_->dataset = std::move(dataset);
  impl_->samples_per_batch = micro_batches * micro_batch_size;
  impl_->micro_batch_size = micro_batch_size;
  impl_->shuffle = shuffle;
  impl_->seed = seed;
  impl_->read_ahead = static_cast<size_t>(read_ahead);
  impl_->thread = std::thread([impl = impl_.get(), first_batch] { impl->run(first_batch); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->changed.notify_all();
  impl_->thread.join();
}

Batch Loader::next() {
  std::unique_lock lock(impl_->mutex);
  impl_->changed.wait(lock, [this] { return !impl_->ready.empty() || impl_->error; });
  if (impl_->ready.empty()) std::rethrow_exception(impl_->error);
  Batch batch = std::move(impl_->ready.front());
  impl_->ready.pop_front();
  impl_->changed.notify_all();
  return batch;
}

int64_t Loader::batches_per_epoch() const {
  return impl_->batches_per_epoch();
}

}  // namespace twobp
