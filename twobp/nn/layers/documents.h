// The documents of a batch whose samples have several: its optional field `document_starts` (B, S) int64 tells, for
// each position, where its document begins. Position i attends to [starts[i], i] alone, and is the (i - starts[i])-th
// of its document. Padding begins at itself. With slices (Context::slice), positions count from the beginning of the
// whole sequence.
#pragma once

#include <memory>

#include "twobp/nn/context.h"
#include "twobp/nn/kernels/attention/document_places.h"

namespace twobp {

inline constexpr const char* kDocumentStarts = "document_starts";

// The documents of the micro-batch, which layers share through Context::documents. Null if the field is missing. Throws
// Error for a field of another type or shape, for a document that begins behind one of its positions, and for one that
// begins before the document that stands before it.
std::shared_ptr<const DocumentPlaces> documents_of(const Context& context, int64_t batch, int64_t positions);

}  // namespace twobp
