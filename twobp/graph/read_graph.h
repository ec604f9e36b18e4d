// Reads graph.json and constants.safetensors of a bundle (docs/bundle.md). Both are untrusted: operators must be on the
// list, with arguments of their schemas; slots are written once, before they are read; indices, dtypes, sizes and
// counts have limits. Errors name the file and the place in it.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "twobp/graph/graph.h"

namespace twobp::graph {

inline constexpr const char* kGraphFile = "graph.json";

// Throws Error.
std::shared_ptr<Graph> read_graph(const std::string& folder);

// The same from memory. `origin` names the text in messages.
std::shared_ptr<Graph> parse_graph(std::string_view json, const std::string& origin, Tensors constants);

// Adds one more entry of `shapes`, with the constants that only it has. It belongs to a variant of the module. Does
// nothing if a shape of exactly these fields is there. Throws Error and leaves the graph as it was.
void add_shape(Graph& graph, std::string_view json, const std::string& origin, Tensors constants, int variant = 0);

}  // namespace twobp::graph
