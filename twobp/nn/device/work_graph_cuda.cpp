#include <utility>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "twobp/nn/device/work_graph.h"

namespace twobp {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// LibTorch's allocator wants to be told of captures from 2.13 on.
template <typename Allocator>
void mark_begin(Allocator& all, c10::DeviceIndex device) {
  if constexpr (requires { all.markCaptureBegin(device); }) all.markCaptureBegin(device);
}
template <typename Allocator>
void mark_end(Allocator& all, c10::DeviceIndex device) {
  if constexpr (requires { all.markCaptureEnd(device); }) all.markCaptureEnd(device);
}

// A pool for what recorded streams allocate on devices other than the current one, because LibTorch's graphs have no
// pool there.
class OtherPool {
 public:
  OtherPool(c10::DeviceIndex device, at::cuda::MempoolId_t id) : device_(device), id_(id) {
    allocator::beginAllocateToPool(device, id, &is_recorded);
    mark_begin(*allocator::get(), device);
  }
  ~OtherPool() {
    try {
      end();
      allocator::releasePool(device_, id_);
    } catch (const c10::Error&) {
      // The device has already failed.
    }
  }
  OtherPool(const OtherPool&) = delete;
  OtherPool& operator=(const OtherPool&) = delete;

  // Call this when the recording has ended.
  void end() {
    if (!std::exchange(records_, false)) return;
    mark_end(*allocator::get(), device_);
    allocator::endAllocateToPool(device_, id_);
  }

 private:
  // Only one recording is active at a time.
  static bool is_recorded(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status == cudaStreamCaptureStatusActive;
  }

  c10::DeviceIndex device_;
  at::cuda::MempoolId_t id_;
  bool records_ = true;
};

// On each device, the work allocates from a pool that belongs to the graph. Unused cached memory is freed first,
// because a recording cannot use it.
class CudaGraph : public WorkGraph {
 public:
  CudaGraph(const std::vector<at::Device>& devices, const std::function<void()>& work) {
    allocator::emptyCache();
    const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
    // Relaxed, because other threads launch work and may allocate during the recording.
    graph_.capture_begin(pool, cudaStreamCaptureModeRelaxed);
    try {
      for (size_t i = 1; i < devices.size(); ++i)
        others_.push_back(std::make_unique<OtherPool>(devices[i].index(), pool));
      work();
    } catch (...) {
      try {
        graph_.capture_end();
      } catch (const c10::Error&) {
        // The error that ended the recording is the one to report.
      }
      throw;
    }
    graph_.capture_end();
    for (const auto& other : others_) other->end();
  }
  void replay() override { graph_.replay(); }

 private:
  std::vector<std::unique_ptr<OtherPool>> others_;  // must outlive the graph
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<WorkGraph> record_cuda_graph(const std::vector<at::Device>& devices,
                                             const std::function<void()>& work) {
  return std::make_unique<CudaGraph>(devices, work);
}

}  // namespace twobp
