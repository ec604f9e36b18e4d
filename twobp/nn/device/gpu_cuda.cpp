#include <cstddef>
#include <cuda.h>
#include <dlfcn.h>
#include <utility>
#include <vector>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "twobp/core/check.h"
#include "twobp/nn/device/gpu.h"

namespace twobp {
namespace {

// A function of the driver, which LibTorch loads and does not link. The header may redirect a function to another name.
template <typename Function>
Function* driver_function(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  void* const function = library == nullptr ? nullptr : dlsym(library, name);
  TWOBP_CHECK(function != nullptr, "pipeline.gpu_parts: the driver has no ", name,
              ": it needs one for CUDA 12.4 or later; set it to false");
  return reinterpret_cast<Function*>(function);
}
#define TWOBP_NAME_OF(function) #function
#define TWOBP_NAME(function) TWOBP_NAME_OF(function)
#define TWOBP_DRIVER(function) driver_function<decltype(function)>(TWOBP_NAME(function))

void check(CUresult result, const char* what) {
  TWOBP_CHECK(result == CUDA_SUCCESS, "pipeline.gpu_parts: ", what, " fails with CUDA's error ",
              static_cast<int>(result), ": set it to false");
}

class GreenContexts : public GpuParts {
 public:
  GreenContexts(c10::Device gpu, int parts) : gpu_(gpu), contexts_(parts) {
    const c10::cuda::CUDAGuard here(gpu_);
    c10::cuda::getCurrentCUDAStream().synchronize();  // makes the primary context
    CUdevice device = 0;
    check(TWOBP_DRIVER(cuDeviceGet)(&device, gpu.index()), "cuDeviceGet");
    CUdevResource all{};
    check(TWOBP_DRIVER(cuDeviceGetDevResource)(device, &all, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource");
    const std::vector<CUdevResource> groups = split(all, static_cast<unsigned>(parts));
    for (size_t i = 0; i < groups.size(); ++i) {
      CUdevResource group = groups[i];
      CUdevResourceDesc description = nullptr;
      check(TWOBP_DRIVER(cuDevResourceGenerateDesc)(&description, &group, 1), "cuDevResourceGenerateDesc");
      check(TWOBP_DRIVER(cuGreenCtxCreate)(&contexts_[i], description, device, CU_GREEN_CTX_DEFAULT_STREAM),
            "cuGreenCtxCreate");
    }
  }
  ~GreenContexts() override {
    for (CUstream stream : streams_) TWOBP_DRIVER(cuStreamDestroy)(stream);
    for (CUgreenCtx context : contexts_) {
      if (context != nullptr) TWOBP_DRIVER(cuGreenCtxDestroy)(context);
    }
  }
  GreenContexts(const GreenContexts&) = delete;
  GreenContexts& operator=(const GreenContexts&) = delete;

  c10::Stream make_stream(int part) override {
    const c10::cuda::CUDAGuard here(gpu_);
    int lowest = 0;
    int highest = 0;
    check(TWOBP_DRIVER(cuCtxGetStreamPriorityRange)(&lowest, &highest), "cuCtxGetStreamPriorityRange");
    CUstream stream = nullptr;
    check(TWOBP_DRIVER(cuGreenCtxStreamCreate)(&stream, contexts_.at(part), CU_STREAM_NON_BLOCKING, highest),
          "cuGreenCtxStreamCreate");
    streams_.push_back(stream);
    return c10::cuda::getStreamFromExternal(stream, gpu_.index()).unwrap();
  }

 private:
  // Each part gets as many multiprocessors as possible. CUDA rounds up to the units that the GPU schedules together.
  static std::vector<CUdevResource> split(CUdevResource& all, unsigned parts) {
    for (unsigned each = all.sm.smCount / parts; each > 0; --each) {
      std::vector<CUdevResource> groups(parts);
      CUdevResource rest{};
      unsigned count = parts;
      const CUresult result = TWOBP_DRIVER(cuDevSmResourceSplitByCount)(groups.data(), &count, &all, &rest, 0, each);
      if (result == CUDA_SUCCESS && count == parts) return groups;
    }
    fail("pipeline.gpu_parts: a GPU of ", all.sm.smCount, " multiprocessors cannot be cut into ", parts,
         " parts: use fewer ranks, or set it to false");
  }

  c10::Device gpu_;
  std::vector<CUgreenCtx> contexts_;
  std::vector<CUstream> streams_;
};

}  // namespace

std::shared_ptr<GpuParts> cut_cuda_gpu(c10::Device gpu, int parts) {
  // Until the program ends: LibTorch's allocator may still ask for streams whose devices are gone.
  static auto* const kept = new std::vector<std::shared_ptr<GpuParts>>;
  kept->push_back(std::make_shared<GreenContexts>(gpu, parts));
  return kept->back();
}

namespace {

c10::Stream make_cuda_stream(c10::Device device, bool high_priority) {
  const c10::cuda::CUDAGuard here(device);
  int lowest = 0;
  int highest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high_priority ? highest : lowest));
  return c10::cuda::getStreamFromExternal(stream, device.index()).unwrap();
}

DeviceFacts cuda_facts(c10::Device device) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  DeviceFacts facts;
  facts.model = properties.name;
  for (const char byte : properties.uuid.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    const auto number = static_cast<unsigned char>(byte);
    facts.id += {kDigits[number / 16], kDigits[number % 16]};
  }
  return facts;
}

}  // namespace

DeviceSupport cuda_support() {
  return {&make_cuda_stream, &cuda_facts, &cut_cuda_gpu};
}

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
