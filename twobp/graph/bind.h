// Programs for many shapes of a micro-batch become programs for one.
#pragma once

#include <memory>
#include <string>

#include "twobp/graph/graph.h"

namespace twobp::graph {

// Whether a tensor of this type may be a field. `type` may have sizes that are kAnySize.
bool may_be(const TensorType& type, const TensorType& field);

// `shape` with the numbers and tables of micro-batches of these fields, which have its fields' types. Null if it has no
// programs for them, and then `why` is the reason. Throws Error if a table cannot be computed.
std::shared_ptr<Shape> bind(const Shape& shape, const FieldTypes& batch, const Tensors& constants, std::string& why);

}  // namespace twobp::graph
