#include "twobp/nn/device/work_graph.h"

#include <map>
#include <mutex>

namespace twobp {
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
