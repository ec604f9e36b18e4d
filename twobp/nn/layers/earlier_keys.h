// Causal attention passes keys and values to later slices of a sequence (Context::slice), and their gradients back,
// through Saved::to_later and from_later.
#pragma once

#include <vector>

#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/saved.h"

namespace twobp {

// F of a slice leaves its keys and values, already rotated, for the later ones: `packed` (B, S, packed()), if it
// `keeps` that for its I anyway, or else a copy of them.
void leave_keys(const at::Tensor& packed, const PackedAttention& attention, bool keeps, Saved& saved);

// The keys and values of the slices before, in order, in `type`. Throws Error if a slice left none, or they are no
// `batch` of such rows.
std::vector<EarlierKeys> earlier_keys(const Saved& saved, const PackedAttention& attention, int64_t batch,
                                      at::ScalarType type);

// I of a slice takes over the gradient from later slices, and makes room for that of the earlier ones. The slice's own
// keys are then no longer held for others.
void join_gradients(PackedAttention& attention, Saved& saved);

}  // namespace twobp
