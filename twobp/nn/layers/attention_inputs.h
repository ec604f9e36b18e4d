// What attention reads besides its input: documents, padding, and keys of earlier slices.
#pragma once

#include <memory>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/saved.h"

namespace twobp {

inline constexpr const char* kDocumentStarts = "document_starts";

// The documents of the micro-batch, which layers share through Context::documents. Null if the field is missing. Throws
// Error for a field of another type or shape, for a document that begins behind one of its positions, and for one that
// begins before the document that stands before it.
std::shared_ptr<const DocumentPlaces> documents_of(const Context& context, int64_t batch, int64_t positions);

// The padding of a batch: its optional field `attention_mask` (B, S) int64 is 0 at padding, as in transformers.

// Returns where the micro-batch has padding, (B, S) bool on `device`. With slices (Context::slice), S are the positions
// up to the end of the slice, and attention_mask is that of the whole sequences. Undefined if the field is missing.
// Also undefined if there is no padding and the field is on the host, where a look at it waits for nothing. Throws
// Error for a field of another type or shape.
at::Tensor padding_of(const Context& context, int64_t batch, int64_t positions, at::Device device);

// The numbers (B, S) that attention adds to the scores of keys, so that no query attends to padding. Undefined if
// `padding` is.
at::Tensor shift_of(const at::Tensor& padding, const at::TensorOptions& options);

// Causal attention passes keys and values to later slices of a sequence (Context::slice), and their gradients back,
// through Saved::to_later and from_later.

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
