// ATen's fused CUDA kernels of attention, forward and backward: FlashAttention (arXiv 2307.08691) for 16-bit types, and
// the memory-efficient kernels (arXiv 2112.05682) for float32 and for a bias. Their bits are the same every time,
// because Device::open asks LibTorch for deterministic algorithms.
//
// What they take was read from ATen's sources of LibTorch 2.13: attention.cu, attention_backward.cu, flash_api.cpp,
// kernel_forward.h and kernel_backward.h. fused_attention_test.cpp checks every call for it.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/ATen.h>

#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/kernels/rows/row_arguments.h"

namespace twobp {

// Attention of q (B, S, H, D) and of k and v (B, L, K, D), where K divides H.
struct FusedHeads {
  // Which keys query i sees. The numbers are those of the memory-efficient kernels.
  enum class Causal : int64_t {
    kNo = 0,         // all
    kFromFirst = 1,  // up to key i
    kFromLast = 2    // up to key L - S + i
  };

  Causal causal = Causal::kNo;
  int64_t window = 0;           // keys that a query sees at most, its last one included; 0: no limit
  std::optional<double> scale;  // of the scores, above 0; none: 1 / sqrt(D)
  at::Tensor bias{};            // (B, H, S, L), of key_bias() or score_bias(); undefined: none
  // Kernels draw the mask of the probabilities from the numbers of their own generator. It depends on mask.key and
  // mask.micro_batch alone (and on sizes), so backward draws it again. It is not the mask of the operators.
  // FlashAttention compares 8 random bits, so it drops up to 1/256 more or less than the rest.
  DropoutMask dropout{};
  // With L = S and kFromLast: query i sees keys of its own document only. Null: no documents.
  const DocumentRows* documents = nullptr;
};

// Whether the kernels compute tensors of this device and type, with heads of `dim` numbers.
bool fused_kernels_take(at::Device device, at::ScalarType type, int64_t dim);
// Whether they compute this, if they take its tensors.
bool fused_kernels_compute(at::ScalarType type, int64_t batch, int64_t queries, int64_t heads, int64_t keys,
                           const FusedHeads& form);

// Biases of the scores, for the memory-efficient kernels, which read rows at multiples of 16 bytes.
// shift (B, L) is added to the scores of a sample's keys.
at::Tensor key_bias(const at::Tensor& shift, int64_t heads, int64_t queries, at::ScalarType type);
// `mask` can be expanded to `scores`, (B, H, S, L). It is added to the scores, or is of bool: true where a query sees a
// key. The bias is finite: a query that sees no key gives numbers, which the caller discards.
at::Tensor score_bias(const at::Tensor& mask, at::IntArrayRef scores, at::ScalarType type);

// out (B, S, H, D), contiguous, and log_sum_exp (B, H, S), float32.
std::tuple<at::Tensor, at::Tensor> fused_heads_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                       const FusedHeads& form);
// dL/dq, dL/dk and dL/dv from dL/dout, in the sizes of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> fused_heads_backward(const at::Tensor& dout, const at::Tensor& q,
                                                                    const at::Tensor& k, const at::Tensor& v,
                                                                    const at::Tensor& out,
                                                                    const at::Tensor& log_sum_exp,
                                                                    const FusedHeads& form);

// While this object lives, CPUs have the kernels. For tests that register some, with nothing else running.
class FusedKernelsOnCpus {
 public:
  FusedKernelsOnCpus();
  ~FusedKernelsOnCpus();
  FusedKernelsOnCpus(const FusedKernelsOnCpus&) = delete;
  FusedKernelsOnCpus& operator=(const FusedKernelsOnCpus&) = delete;
};

}  // namespace twobp
