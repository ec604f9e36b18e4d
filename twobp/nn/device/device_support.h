// Functions of a kind of device that ranks need and LibTorch's device-generic interface lacks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include "twobp/nn/device/gpu_parts.h"

namespace twobp {

struct DeviceFacts {
  std::string model;  // "NVIDIA H100 80GB HBM3"
  std::string id;     // unique to this device, whatever its index in this process is
};

struct DeviceSupport {
  // A stream that no other code gets until the program ends. LibTorch hands out its 32 streams of a priority in turn,
  // so the 33rd is the first again. A transfer that waits for its peer would then hold up computations.
  c10::Stream (*make_stream)(c10::Device device, bool high_priority);
  DeviceFacts (*facts)(c10::Device device);
  // Cuts the device into parts, as GpuParts::cut() does. Null if that is impossible.
  std::shared_ptr<GpuParts> (*cut)(c10::Device device, int parts) = nullptr;
};

// Ranks can compute on this kind of device. LibTorch's CUDA is built in.
void support_devices(c10::DeviceType type, const DeviceSupport& support);
// Throws Error for a kind that is not supported.
const DeviceSupport& device_support(c10::DeviceType type);
// The values of pipeline.device: "cpu", "cuda", and the others' names in LibTorch.
std::vector<std::string> device_names();

// In a program without CUDA, these functions are never called.
DeviceSupport cuda_support();
// Of cuda_support().
std::shared_ptr<GpuParts> cut_cuda_gpu(c10::Device gpu, int parts);

}  // namespace twobp
