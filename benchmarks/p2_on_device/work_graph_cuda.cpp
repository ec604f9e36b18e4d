#include <ATen/cuda/CUDAGraph.h>

#include "benchmarks/p2_on_device/work_graph.h"

namespace twobp {
namespace {

// What the work allocates comes from a pool that is the graph's own.
class CudaGraph : public WorkGraph {
 public:
  explicit CudaGraph(const std::function<void()>& work) {
    graph_.capture_begin();
    work();
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<WorkGraph> record_graph(const Device& device, const std::function<void()>& work) {
  if (!device.where().is_cuda()) return nullptr;
  return std::make_unique<CudaGraph>(work);
}

}  // namespace twobp
