// In place of work_graph_cuda.cpp where LibTorch has no CUDA.
#include "benchmarks/p2_on_device/work_graph.h"

namespace twobp {

std::unique_ptr<WorkGraph> record_graph(const Device&, const std::function<void()>&) {
  return nullptr;
}

}  // namespace twobp
