// The labels of a model that predicts the next token. Users give label t for token t, as for transformers. The model
// reads, for each position, the label that the position predicts.
#pragma once

#include "twobp/nn/context.h"

namespace twobp {

// Moves `labels` (B, S) of the fields to the positions that predict them. The last position predicts nothing, and
// neither does the last of a document, if there are `document_starts`. Throws Error for labels of another shape.
Fields to_predicting_positions(Fields fields);

}  // namespace twobp
