#include "twobp/nn/device/device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "twobp/core/check.h"
#include "twobp/nn/device/gpu.h"

namespace twobp {
namespace {

constexpr const char* kOnCpus =
    "compute on CPUs: pipeline.device = \"cpu\", pipeline.transport = \"mpi\" or \"threads\"";

const c10::impl::DeviceGuardImplInterface* support_for(at::DeviceType type) {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(type)].load();
}

at::DeviceType type_called(const std::string& name) {
  try {
    const at::Device device(name);
    TWOBP_CHECK(!device.has_index(), "name a device by its kind alone, not as '", name, "'");
    return device.type();
  } catch (const c10::Error&) {
    fail("no device is called '", name, "': use cpu or cuda");
  }
}

// Streams share the GPU's queues, 8 by default. A transfer that waits for its peer would block later computations in
// the same queue. The number must be set before the first use of the GPU.
void set_environment(at::DeviceType type) {
  if (type == at::kCUDA)
    set_cuda_variable("CUDA_DEVICE_MAX_CONNECTIONS", "32", "computations may wait for transfers of other streams");
}

int count_of(at::DeviceType type) {
  set_environment(type);
  const std::string name = c10::DeviceTypeName(type, true);
  const auto* support = support_for(type);
  TWOBP_CHECK(support, "this LibTorch has no ", name, ": build with one that has it, or ", kOnCpus);
  const int count = support->deviceCount();
  TWOBP_CHECK(count > 0, "no ", name,
              " device is visible: check that the driver is loaded and CUDA_VISIBLE_DEVICES names one, or ", kOnCpus);
  return count;
}

}  // namespace

void set_cuda_variable(const char* name, const std::string& value, const char* consequence) {
  static std::mutex mutex;
  static std::set<std::string> said;
  const std::lock_guard lock(mutex);
  setenv(name, value.c_str(), /*overwrite=*/0);
  const std::string now = std::getenv(name);
  if (now != value && said.insert(name).second)
    std::fprintf(stderr, "twobp: %s is %s instead of %s: %s\n", name, now.c_str(), value.c_str(), consequence);
}

DeviceEvent DeviceStream::record(c10::EventFlag flag) const {
  DeviceEvent event;
  if (stream_) {
    auto recorded = std::make_shared<c10::Event>(stream_->device_type(), flag);
    recorded->record(*stream_);
    event.event_ = std::move(recorded);
  }
  return event;
}

void DeviceStream::wait(const DeviceEvent& event) const {
  if (stream_ && event.event_) event.event_->block(*stream_);
}

void DeviceStream::uses(const at::Tensor& tensor) const {
  if (stream_ && tensor.defined() && tensor.device().type() == stream_->device_type()) tensor.record_stream(*stream_);
}

Device Device::open(const std::string& type, int index) {
  if (type == "cpu") return {};
  return open(type_called(type), index);
}

int Device::count(const std::string& type) {
  return count_of(type_called(type));
}

std::vector<Device> Device::open_for(const std::string& type, int ranks, bool in_parts) {
  if (type == "cpu") return {};
  std::vector<Device> devices = {open(type, 0)};
  const int count = support_for(devices[0].where_.type())->deviceCount();
  while (static_cast<int>(devices.size()) < ranks)
    devices.push_back(open(type, static_cast<int>(devices.size()) % count));
  for (int gpu = 0; in_parts && gpu < std::min(count, ranks); ++gpu) {
    const int sharing = (ranks - gpu + count - 1) / count;
    if (sharing == 1) continue;
    const auto parts = GpuParts::cut(devices[gpu].where_, sharing);
    for (int part = 0; part < sharing; ++part) devices[gpu + part * count].move_to_part(parts, part);
  }
  return devices;
}

// Copies from other GPUs need no multiprocessors.
void Device::move_to_part(std::shared_ptr<GpuParts> parts, int part) {
  compute_ = DeviceStream(parts->make_stream(part));
  sums_ = DeviceStream(parts->make_stream(part));
  parts_ = std::move(parts);
}

Device Device::open(at::DeviceType type, int index) {
  set_environment(type);
  if (type == at::kCUDA) {
    // The same bits every time. An operator without a deterministic algorithm is an error. Memory need not be filled
    // for this.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
    at::globalContext().setDeterministicCuDNN(true);
    at::globalContext().setAllowTF32CuDNN(false);  // float32 is float32, as in matrix products
    // Sums of 16-bit products are in float32, also in products that are split along k.
    at::globalContext().setAllowFP16ReductionCuBLAS(false);
    at::globalContext().setAllowBF16ReductionCuBLAS(false);
  }
  const int count = count_of(type);
  TWOBP_CHECK(index >= 0 && index < count, "a rank here needs ", c10::DeviceTypeName(type, true), " device ", index,
              ", but only ", count, count == 1 ? " is" : " are", " visible: start fewer ranks on this machine, or ",
              kOnCpus);
  Device device;
  device.where_ = at::Device(type, static_cast<at::DeviceIndex>(index));
  // Others wait for transfers and sums, which need few multiprocessors, so these start first.
  device.compute_ = device.make_stream(false);
  device.sums_ = device.make_stream(true);
  device.to_compute_ = std::make_shared<Copies>(device.make_stream(true));
  device.to_sum_ = std::make_shared<Copies>(device.make_stream(true));
  return device;
}

DeviceStream Device::make_stream(bool high_priority) const {
  if (where_.is_cpu()) return {};
  return DeviceStream(device_support(where_.type()).make_stream(where_, high_priority));
}

DeviceStream Device::current() const {
  if (where_.is_cpu()) return {};
  return DeviceStream(support_for(where_.type())->getStream(where_));
}

void Device::prepare_libraries() const {
  if (!asynchronous()) return;
  const OnStream here(compute_);
  const at::Tensor one = at::ones({1, 1}, at::TensorOptions(at::kFloat).device(where_));
  at::mm(one, one);
}

DeviceStream Device::Copies::from(at::Device source) {
  const std::lock_guard lock(mutex);
  for (const auto& [device, stream] : sources) {
    if (device == source) return stream;
  }
  const DeviceStream stream(device_support(source.type()).make_stream(source, true));
  sources.emplace_back(source, stream);
  return stream;
}

Values Device::fetch(Values values, const DeviceEvent& ready) const {
  if (!asynchronous()) return values;
  const DeviceStream user = current();
  Copies& copies = *user == *sums_ ? *to_sum_ : *to_compute_;
  bool copied = false;
  for (at::Tensor& value : values) {
    if (!value.defined() || value.device().type() != where_.type()) continue;
    if (value.device() == where_) {
      user.uses(value);  // belongs to another rank on this GPU
      continue;
    }
    // LibTorch copies on the source's current stream, behind the work of the target's current stream, which then waits
    // for the copy. With computing streams there, a copy would wait for all work that either has queued. Here, both
    // wait for `ready` alone.
    const DeviceStream source = copies.from(value.device());
    copies.here.wait(ready);
    source.uses(value);
    const OnStream there(source);
    const OnStream here(copies.here);
    value = value.to(where_, /*non_blocking=*/true);
    user.uses(value);
    copied = true;
  }
  user.wait(copied ? copies.here.record() : ready);
  return values;
}

}  // namespace twobp
