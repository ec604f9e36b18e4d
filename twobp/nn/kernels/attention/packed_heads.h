// The heads of packed rows as tensors, for attention by LibTorch's operators and kernels.
#pragma once

#include "twobp/nn/kernels/attention/packed_attention.h"

namespace twobp {

// q (B, S, H, D), k and v (B, P + S, K, D): views of the rows, or copies behind those of earlier slices, so that one
// product reads them all.
struct PackedHeads {
  PackedHeads(const at::Tensor& packed, const PackedAttention& attention);
  at::Tensor q, k, v;
};

// Passes on the gradients of these, dq (B, S, H, D), dk and dv (B, P + S, K, D): adds those of earlier keys to theirs,
// and writes the others, with what came from later slices, to `dpacked`.
void give_gradients(const PackedAttention& attention, const at::Tensor& dq, at::Tensor dk, at::Tensor dv,
                    at::Tensor& dpacked);

}  // namespace twobp
