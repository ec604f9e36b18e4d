#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "twobp/nn/device/work_graph.h"

namespace twobp {
namespace {

// What the work allocates comes from a pool that is the graph's own: what was freed before is given back,
// since no recording can take it.
class CudaGraph : public WorkGraph {
 public:
  explicit CudaGraph(const std::function<void()>& work) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    // Relaxed: other threads put work in, and may allocate meanwhile.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeRelaxed);
    try {
      work();
    } catch (...) {
      try {
        graph_.capture_end();
      } catch (const c10::Error&) {
        // What has ended the recording is the error to report.
      }
      throw;
    }
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<WorkGraph> record_cuda_graph(const std::function<void()>& work) {
  return std::make_unique<CudaGraph>(work);
}

}  // namespace twobp
