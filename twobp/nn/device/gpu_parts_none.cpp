#include "twobp/core/check.h"
#include "twobp/nn/device/gpu_parts.h"

namespace twobp {

std::shared_ptr<GpuParts> GpuParts::cut(c10::Device gpu, int) {
  fail("pipeline.gpu_parts: ", gpu.str(), " cannot be cut into parts by a program that was built with a ",
       "LibTorch without CUDA: set it to false");
}

}  // namespace twobp
