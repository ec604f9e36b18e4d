// Without LibTorch's CUDA, no device of that kind is ever opened.
#include "twobp/nn/device/gpu.h"

namespace twobp {

DeviceSupport cuda_support() {
  return {};
}

// Replaces work_graph_cuda.cpp if LibTorch has no CUDA.
std::unique_ptr<WorkGraph> record_cuda_graph(const std::vector<at::Device>&, const std::function<void()>&) {
  return nullptr;
}

}  // namespace twobp
