// Replaces work_graph_cuda.cpp if LibTorch has no CUDA.
#include "twobp/nn/device/work_graph.h"

namespace twobp {

std::unique_ptr<WorkGraph> record_cuda_graph(const std::vector<at::Device>&, const std::function<void()>&) {
  return nullptr;
}

}  // namespace twobp
