#include <utility>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "twobp/nn/device/work_graph.h"

namespace twobp {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// What recorded streams allocate on a device beside the current one, where LibTorch's graphs have no pool.
class OtherPool {
 public:
  OtherPool(c10::DeviceIndex device, at::cuda::MempoolId_t id) : device_(device), id_(id) {
    allocator::beginAllocateToPool(device, id, &is_recorded);
    allocator::markCaptureBegin(device);
  }
  ~OtherPool() {
    try {
      end();
      allocator::releasePool(device_, id_);
    } catch (const c10::Error&) {
      // Of a device that has failed already.
    }
  }
  OtherPool(const OtherPool&) = delete;
  OtherPool& operator=(const OtherPool&) = delete;

  // The recording has ended.
  void end() {
    if (!std::exchange(records_, false)) return;
    allocator::markCaptureEnd(device_);
    allocator::endAllocateToPool(device_, id_);
  }

 private:
  // Only one recording goes on at a time.
  static bool is_recorded(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status == cudaStreamCaptureStatusActive;
  }

  c10::DeviceIndex device_;
  at::cuda::MempoolId_t id_;
  bool records_ = true;
};

// What the work allocates comes from a pool that is the graph's own, on each device: what was freed before is
// given back, since no recording can take it.
class CudaGraph : public WorkGraph {
 public:
  CudaGraph(const std::vector<at::Device>& devices, const std::function<void()>& work) {
    allocator::emptyCache();
    const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
    // Relaxed: other threads put work in, and may allocate meanwhile.
    graph_.capture_begin(pool, cudaStreamCaptureModeRelaxed);
    try {
      for (size_t i = 1; i < devices.size(); ++i)
        others_.push_back(std::make_unique<OtherPool>(devices[i].index(), pool));
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
    for (const auto& other : others_) other->end();
  }
  void replay() override { graph_.replay(); }

 private:
  std::vector<std::unique_ptr<OtherPool>> others_;  // outlive the graph
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<WorkGraph> record_cuda_graph(const std::vector<at::Device>& devices,
                                             const std::function<void()>& work) {
  return std::make_unique<CudaGraph>(devices, work);
}

}  // namespace twobp
