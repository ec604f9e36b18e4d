// The padding of a batch: its optional field `attention_mask` (B, S) int64 is 0 at padding, as in transformers.
#pragma once

#include "twobp/nn/context.h"

namespace twobp {

// Returns where the micro-batch has padding, (B, S) bool on `device`. With slices (Context::slice), S are the positions
// up to the end of the slice, and attention_mask is that of the whole sequences. Undefined if the field is missing.
// Also undefined if there is no padding and the field is on the host, where a look at it waits for nothing. Throws
// Error for a field of another type or shape.
at::Tensor padding_of(const Context& context, int64_t batch, int64_t positions, at::Device device);

// The numbers (B, S) that attention adds to the scores of keys, so that no query attends to padding. Undefined if
// `padding` is.
at::Tensor shift_of(const at::Tensor& padding, const at::TensorOptions& options);

}  // namespace twobp
