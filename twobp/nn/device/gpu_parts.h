// A GPU cut into parts with equal numbers of multiprocessors (CUDA's green contexts, from driver 12.4 on):
// several ranks on one GPU, each confined to its own, wait for each other as ranks on smaller GPUs would.
// They share its memory and its bandwidth all the same.
#pragma once

#include <memory>

#include <c10/core/Stream.h>

namespace twobp {

class GpuParts {
 public:
  // Throws Error: not a GPU, a program built without CUDA, a driver that cannot, or a GPU too small.
  static std::shared_ptr<GpuParts> cut(c10::Device gpu, int parts);
  virtual ~GpuParts() = default;

  // Work put in there runs on this part alone. Lives as long as this object.
  virtual c10::Stream make_stream(int part, bool high_priority) = 0;
};

}  // namespace twobp
