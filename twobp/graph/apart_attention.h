// Attention of queries, keys and values that are tensors of their own, for a device that lacks ATen's kernel for CPUs
// (`_scaled_dot_product_flash_attention_for_cpu`): by ATen's kernels for GPUs (fused_heads.h) where they take it, and
// otherwise by the kernels and operators of our layers.
#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include <ATen/ATen.h>

namespace twobp::graph {

struct ApartAttention {
  bool causal = false;            // query i sees the keys up to i
  at::Tensor mask{};              // added to the scores, or of bool: true where a query sees a key
  std::optional<double> scale{};  // of the scores; none: 1 / sqrt(n)
};

// Whether tensors like q are computed here, and not by ATen's kernel.
bool attends_apart(const at::Tensor& q);

// q (batch, heads, queries, n), k and v (batch, kv_heads, keys, n) -> out, like q, and log_sum_exp (batch, heads,
// queries), in the wide dtype. A query that sees no key gets 0. Throws Error for tensors that do not fit.
std::pair<at::Tensor, at::Tensor> apart_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  const ApartAttention& attention);

// The gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> apart_attention_backward(const at::Tensor& dout, const at::Tensor& q,
                                                                        const at::Tensor& k, const at::Tensor& v,
                                                                        const at::Tensor& out,
                                                                        const at::Tensor& log_sum_exp,
                                                                        const ApartAttention& attention);

}  // namespace twobp::graph
