// Memory for tensors that come from other processes. The last few blocks are reused, because fresh pages cost as much
// as the copy into them.
#pragma once

#include <memory>

#include <ATen/ATen.h>

namespace twobp {

class ReceiveMemory {
 public:
  // Keeps blocks of up to this many bytes in total.
  explicit ReceiveMemory(int64_t most_kept = 64 << 20);

  // Returns an uninitialized host tensor. Its memory is reported to LibTorch's memory profiling as usual, but kept
  // blocks are not. The tensor may outlive this object and be released by any thread.
  at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

  int64_t kept_bytes() const;

 private:
  struct Kept;
  struct Block;
  std::shared_ptr<Kept> kept_;
};

}  // namespace twobp
