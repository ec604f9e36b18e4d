#include "twobp/nn/device/own_streams.h"

#include <map>
#include <mutex>

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace twobp {
namespace {

std::mutex makers_mutex;

std::map<c10::DeviceType, StreamMaker>& makers() {
  static std::map<c10::DeviceType, StreamMaker> makers = {{c10::DeviceType::CUDA, &make_cuda_stream}};
  return makers;
}

}  // namespace

void make_streams_by(c10::DeviceType type, StreamMaker maker) {
  const std::lock_guard lock(makers_mutex);
  makers()[type] = maker;
}

c10::Stream make_own_stream(c10::Device device, bool high_priority) {
  {
    const std::lock_guard lock(makers_mutex);
    const auto found = makers().find(device.type());
    if (found != makers().end()) return found->second(device, high_priority);
  }
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(device.type())]
      .load()
      ->getStreamFromGlobalPool(device, high_priority);
}

}  // namespace twobp
