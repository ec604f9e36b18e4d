// ATen's fused kernels of attention for CPUs, which LibTorch has for GPUs alone. They refuse what ATen's CUDA code
// refuses or reads wrongly, and compute in float64 from whole matrices of scores. A program that links this file has
// them, and uses them where FusedKernelsOnCpus says so.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>

namespace twobp::test {

// The last call of a kernel.
struct FusedCall {
  enum class Kernel { kNone, kFlash, kFlashBackward, kEfficient, kEfficientBackward };
  Kernel kernel = Kernel::kNone;
  uint64_t seed = 0;    // of dropout
  double dropout = 0;   // its probability
  at::Tensor bounds{};  // of documents
  int64_t longest = 0;  // of documents
};

// Of the calling thread. Forgets it.
FusedCall last_fused_call();

// The factors of dropout, float64 (B, H, S, L), of a call of a kernel. FlashAttention: of document `first` and those
// that follow.
at::Tensor fused_dropout(bool flash, uint64_t seed, double p, at::IntArrayRef scores, int64_t first = 0);

}  // namespace twobp::test
