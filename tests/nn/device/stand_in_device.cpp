#include "tests/nn/device/stand_in_device.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace twobp::test {
namespace {

constexpr auto kType = at::DeviceType::PrivateUse1;

// It is set once by a stream. Other streams and threads wait for it.
class Flag {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    is_set_ = true;
    at_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }
  std::chrono::steady_clock::time_point at() {
    const std::lock_guard lock(mutex_);
    return at_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_set_; });
  }
  bool is_set() {
    const std::lock_guard lock(mutex_);
    return is_set_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
  std::chrono::steady_clock::time_point at_;
};

// Records which streams are recorded, and whether another stream has waited for all work of each.
class Recorded {
 public:
  using Key = std::pair<int, c10::StreamId>;
  static Key key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

  void begin(const c10::Stream& origin) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(streams_.empty(), "streams are recorded already");
    origin_ = key_of(origin);
    streams_[origin_] = false;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    const auto streams = std::exchange(streams_, {});
    for (const auto& [key, waited_for] : streams)
      TORCH_CHECK(waited_for || key == origin_, "nothing waits for a stream that is recorded");
  }
  std::optional<Key> of(const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(key_of(stream));
    return found == streams_.end() ? std::nullopt : std::optional(found->first);
  }
  // `stream` waits for an event. `event` is the event's stream, if that was recorded when the event was made.
  void wait(const c10::Stream& stream, const std::optional<Key>& event) {
    const std::lock_guard lock(mutex_);
    if (streams_.empty()) return;
    const Key key = key_of(stream);
    TORCH_CHECK(event || !streams_.contains(key), "a stream that is recorded waits for one that is not");
    if (!event) return;
    streams_[key] = false;
    if (*event != key) streams_[*event] = true;
  }

 private:
  std::mutex mutex_;
  Key origin_;
  std::map<Key, bool> streams_;
};

Recorded& recorded() {
  static auto* recorded = new Recorded;
  return *recorded;
}

struct StandInEvent {
  std::shared_ptr<Flag> flag = std::make_shared<Flag>();
  std::optional<Recorded::Key> stream;  // if it is recorded
};

// A thread that runs tasks one after another until the program ends.
class Worker {
 public:
  Worker() {
    std::thread([this] { work(); }).detach();
  }
  void put(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return queue_.empty();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const std::function<void()> next = queue_.front();
      lock.unlock();
      next();
      lock.lock();
      queue_.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
};

thread_local int current_device = 0;
thread_local std::map<int, c10::StreamId> current_streams;

// The functions that LibTorch requires from a backend. Stream 0 of a device is the default stream.
class Backend : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    current_device = device.index();
    return old;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    const std::lock_guard lock(mutex_);
    return c10::Stream(c10::Stream::UNSAFE, device, ++streams_made_);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &worker(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return kStandInDevices; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<StandInEvent*>(*event);
    auto* made = new StandInEvent{.stream = recorded().of(stream)};
    *event = made;
    worker(stream).put([flag = made->flag] { flag->set(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    recorded().wait(stream, static_cast<StandInEvent*>(event)->stream);
    worker(stream).put([flag = flag_of(event)] { flag->wait(); });
  }
  bool queryEvent(void* event) const override { return !event || flag_of(event)->is_set(); }
  void synchronizeEvent(void* event) const override {
    if (event) flag_of(event)->wait();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(flag_of(to)->at() - flag_of(from)->at()).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<StandInEvent*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override { return worker(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Flag done;
    worker(stream).put([&done] { done.set(); });
    done.wait();
  }

 private:
  static std::shared_ptr<Flag> flag_of(void* event) { return static_cast<StandInEvent*>(event)->flag; }
  Worker& worker(const c10::Stream& stream) const {
    const std::lock_guard lock(mutex_);
    auto& worker = workers_[{stream.device_index(), stream.id()}];
    if (!worker) worker = new Worker;
    return *worker;
  }

  mutable std::mutex mutex_;
  mutable c10::StreamId streams_made_ = 0;
  mutable std::map<std::pair<int, c10::StreamId>, Worker*> workers_;
};

const c10::impl::DeviceGuardImplRegistrar registrar(kType, new Backend);

}  // namespace

void begin_recording() {
  const c10::impl::VirtualGuardImpl guard(kType);
  recorded().begin(guard.getStream(guard.getDevice()));
}

void end_recording() {
  recorded().end();
}

Device stand_in_device(int index) {
  return Device::open(kType, index);
}

void put(const DeviceStream& stream, std::function<void()> work) {
  put(stream.native(), std::move(work));
}

void put(void* native_stream, std::function<void()> work) {
  static_cast<Worker*>(native_stream)->put(std::move(work));
}

}  // namespace twobp::test
