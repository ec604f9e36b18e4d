#include <cstddef>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "twobp/nn/device/device_support.h"

namespace twobp {
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

}  // namespace twobp
