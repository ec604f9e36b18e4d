#include <cuda.h>
#include <dlfcn.h>
#include <vector>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "twobp/core/check.h"
#include "twobp/nn/device/device_support.h"
#include "twobp/nn/device/gpu_parts.h"

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

}  // namespace twobp
