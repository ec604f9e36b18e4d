// Memory for tensors that come from other processes: the last few blocks are used again, since fresh pages
// cost as much as the copy into them.
#pragma once

#include <memory>

#include <ATen/ATen.h>

namespace twobp {

class ReceiveMemory {
 public:
  // Blocks are kept up to this many bytes in all.
  explicit ReceiveMemory(int64_t most_kept = 64 << 20);

  // A host tensor, its bytes as they are. Its memory is reported to LibTorch's memory profiling as any
  // other; what is kept for later is not. The tensor may outlive this object and be released by any thread.
  at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

  int64_t kept_bytes() const;

 private:
  struct Kept;
  struct Block;
  std::shared_ptr<Kept> kept_;
};

}  // namespace twobp
