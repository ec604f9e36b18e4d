// Reads the programs of a shape of graph.json. Slots are written once, before they are read.
#pragma once

#include "twobp/core/json.h"
#include "twobp/graph/graph.h"

namespace twobp::graph {

// A program of the shape, whose `fields`, `sizes` and `positions` have been read. Throws Error.
Program read_program(const JsonNode& node, const Shape& shape);

// What counts the targets of a micro-batch of the shape. Throws Error.
Targets read_targets(const JsonNode& node, const Shape& shape);

// A table of the shape. Throws Error.
Table read_table(const JsonNode& node, const Shape& shape);

}  // namespace twobp::graph
