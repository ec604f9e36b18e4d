#include "twobp/nn/device/gpu.h"

#include <map>
#include <mutex>

#include "twobp/core/check.h"

namespace twobp {
namespace {

struct Supported {
  std::mutex mutex;
  std::map<c10::DeviceType, DeviceSupport> devices = {{c10::DeviceType::CUDA, cuda_support()}};
};

Supported& supported() {
  static Supported supported;
  return supported;
}

}  // namespace

void support_devices(c10::DeviceType type, const DeviceSupport& support) {
  const std::lock_guard lock(supported().mutex);
  supported().devices[type] = support;
}

const DeviceSupport& device_support(c10::DeviceType type) {
  const std::lock_guard lock(supported().mutex);
  const auto found = supported().devices.find(type);
  TWOBP_CHECK(found != supported().devices.end(), "ranks cannot compute on ", c10::DeviceTypeName(type, true),
              ": use cpu or cuda");
  return found->second;
}

std::shared_ptr<GpuParts> GpuParts::cut(c10::Device gpu, int parts) {
  const DeviceSupport& support = device_support(gpu.type());
  TWOBP_CHECK(support.cut, "pipeline.gpu_parts: ", gpu.str(), " cannot be cut into parts: set it to false");
  return support.cut(gpu, parts);
}

std::vector<std::string> device_names() {
  const std::lock_guard lock(supported().mutex);
  std::vector<std::string> names = {"cpu"};
  for (const auto& [type, support] : supported().devices) names.push_back(c10::DeviceTypeName(type, true));
  return names;
}

namespace {

std::mutex mutex;

std::map<at::DeviceType, GraphRecorder>& recorders() {
  static std::map<at::DeviceType, GraphRecorder> recorders = {{at::kCUDA, &record_cuda_graph}};
  return recorders;
}

}  // namespace

void record_graphs_by(at::DeviceType type, GraphRecorder recorder) {
  const std::lock_guard lock(mutex);
  recorders()[type] = recorder;
}

std::unique_ptr<WorkGraph> record_graph(const std::vector<at::Device>& devices, const std::function<void()>& work) {
  GraphRecorder recorder = nullptr;
  {
    const std::lock_guard lock(mutex);
    const auto found = recorders().find(devices.front().type());
    if (found != recorders().end()) recorder = found->second;
  }
  return recorder == nullptr ? nullptr : recorder(devices, work);
}

}  // namespace twobp
