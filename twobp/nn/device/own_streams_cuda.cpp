#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "twobp/nn/device/own_streams.h"

namespace twobp {

c10::Stream make_cuda_stream(c10::Device device, bool high_priority) {
  const c10::cuda::CUDAGuard here(device);
  int lowest = 0;
  int highest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high_priority ? highest : lowest));
  return c10::cuda::getStreamFromExternal(stream, device.index()).unwrap();
}

}  // namespace twobp
