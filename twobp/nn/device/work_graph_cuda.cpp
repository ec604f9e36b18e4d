#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "twobp/nn/device/work_graph.h"

namespace twobp {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// What the work allocates comes from a pool that is the graph's own: what was freed before is given back,
// since no recording can take it.
class CudaGraph : public WorkGraph {
 public:
  CudaGraph(const std::vector<at::Device>& devices, const std::function<void()>& work) {
    allocator::emptyCache();
    // Relaxed: other threads put work in, and may allocate meanwhile.
    graph_.capture_begin(pool_, cudaStreamCaptureModeRelaxed);
    // LibTorch has a pool on the current device alone.
    for (size_t i = 1; i < devices.size(); ++i) {
      others_.push_back(devices[i].index());
      allocator::beginAllocateToPool(others_.back(), pool_, &is_recorded);
    }
    try {
      work();
    } catch (...) {
      end_allocating();
      try {
        graph_.capture_end();
      } catch (const c10::Error&) {
        // What has ended the recording is the error to report.
      }
      release();
      throw;
    }
    end_allocating();
    graph_.capture_end();
  }
  ~CudaGraph() override { release(); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  void replay() override { graph_.replay(); }

 private:
  // Of all streams there are only those of a recording are, and there is one at a time.
  static bool is_recorded(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status == cudaStreamCaptureStatusActive;
  }
  void end_allocating() {
    for (const c10::DeviceIndex other : others_) allocator::endAllocateToPool(other, pool_);
  }
  void release() {
    graph_.reset();
    for (const c10::DeviceIndex other : others_) allocator::releasePool(other, pool_);
    others_.clear();
  }

  const at::cuda::MempoolId_t pool_ = at::cuda::graph_pool_handle();
  at::cuda::CUDAGraph graph_;
  std::vector<c10::DeviceIndex> others_;
};

}  // namespace

std::unique_ptr<WorkGraph> record_cuda_graph(const std::vector<at::Device>& devices,
                                             const std::function<void()>& work) {
  return std::make_unique<CudaGraph>(devices, work);
}

}  // namespace twobp
