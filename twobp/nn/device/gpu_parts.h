// A GPU split into parts with equal numbers of multiprocessors (CUDA's green contexts, from driver 12.4 on). Several
// ranks on one GPU, each confined to its own part, wait for each other like ranks on smaller GPUs. The parts still
// share the GPU's memory and bandwidth.
#pragma once

#include <memory>

#include <c10/core/Stream.h>

namespace twobp {

class GpuParts {
 public:
  // Throws Error if `gpu` is not a GPU or is too small, the program was built without CUDA, or the driver does not
  // support parts.
  static std::shared_ptr<GpuParts> cut(c10::Device gpu, int parts);
  virtual ~GpuParts() = default;

  // Work that is launched in the stream runs on this part alone, at high priority. The stream lives as long as this
  // object.
  virtual c10::Stream make_stream(int part) = 0;
};

}  // namespace twobp
