// Reads the programs of a shape of graph.json. Slots are written once, before they are read.
#pragma once

#include "twobp/core/json.h"
#include "twobp/graph/graph.h"

namespace twobp::graph {

// `fields` are those of the shape. `positions`: of its sequences, if the program takes slices of them; else
// 0. Throws Error.
Program read_program(const JsonNode& node, const FieldTypes& fields, int64_t positions);

// What counts the targets of a micro-batch of these fields. Throws Error.
Targets read_targets(const JsonNode& node, const FieldTypes& fields);

}  // namespace twobp::graph
