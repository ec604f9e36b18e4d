#include "tests/nn/device/stand_in_device.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "tests/nn/device/stand_in_queues.h"
#include "twobp/core/check.h"
#include "twobp/nn/device/gpu.h"

namespace twobp::test {
namespace {

constexpr auto kType = at::DeviceType::PrivateUse1;

std::atomic<int> timed_events_made = 0;
std::atomic<int> transfers_of_all = 0;
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
  // As in LibTorch's CUDA, the streams of a priority come in turn, for all devices of a kind here.
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    const int64_t turn = turns_[high_priority ? 1 : 0]++ % kPool;
    return c10::Stream(c10::Stream::UNSAFE, device, 1 + turn + (high_priority ? kPool : 0));
  }
  static c10::Stream own_stream(c10::Device device, bool) {
    const char* const taken = std::getenv("TWOBP_STAND_IN_TAKEN");
    TWOBP_CHECK(taken == nullptr || std::atoi(taken) != device.index(), "device ", static_cast<int>(device.index()),
                " belongs to another process");
    static std::atomic<c10::StreamId> made = 2 * kPool;
    return c10::Stream(c10::Stream::UNSAFE, device, ++made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  c10::DeviceIndex deviceCount() const noexcept override {
    static const char* const asked = std::getenv("TWOBP_STAND_IN_DEVICES");
    return static_cast<c10::DeviceIndex>(asked == nullptr ? kStandInDevices : std::atoi(asked));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    if (*event == nullptr && flag == c10::EventFlag::BACKEND_DEFAULT) ++timed_events_made;
    destroyEvent(*event, 0);
    *event = new Event{record_point(stream_of(stream))};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_for_point(stream_of(stream), point_of(event));
  }
  bool queryEvent(void* event) const override { return !event || has_passed(*point_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_on_host(*point_of(event));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(point_of(to)->at - point_of(from)->at).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_on_host(stream_of(stream)); }

 private:
  using Event = std::shared_ptr<Point>;
  static const Event& point_of(void* event) { return *static_cast<Event*>(event); }

  static constexpr int64_t kPool = 32;
  mutable std::atomic<int64_t> turns_[2] = {0, 0};
};

DeviceFacts facts_of(c10::Device device) {
  const char* model = std::getenv("TWOBP_STAND_IN_MODEL");
  return {model == nullptr ? "stand-in" : model, concat("device ", static_cast<int>(device.index()))};
}

// A part has nothing of its own but its streams.
class Parts : public GpuParts {
 public:
  Parts(c10::Device device, int parts) : device_(device), parts_(parts) {}
  c10::Stream make_stream(int part) override {
    TWOBP_CHECK(part >= 0 && part < parts_, "part ", part, " of ", parts_);
    return Backend::own_stream(device_, true);
  }

 private:
  c10::Device device_;
  int parts_;
};

std::shared_ptr<GpuParts> cut(c10::Device device, int parts) {
  return std::make_shared<Parts>(device, parts);
}

const c10::impl::DeviceGuardImplRegistrar registrar(kType, new Backend);
[[maybe_unused]] const bool supported = (support_devices(kType, {&Backend::own_stream, &facts_of, &cut}), true);

}  // namespace

int timed_events() {
  return timed_events_made;
}

void transfer_begins() {
  ++transfers_of_all;
}

void transfer_ends() {
  --transfers_of_all;
}

int transfers() {
  return transfers_of_all;
}

Device stand_in_device(int index) {
  return Device::open(kType, index);
}

}  // namespace twobp::test
