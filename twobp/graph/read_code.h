// Reads the programs of graph.json, and their instructions against the schemas of their operators. Slots are written
// once, before they are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "twobp/core/json.h"
#include "twobp/graph/graph.h"

namespace twobp::graph {

// Limits of what graph.json may ask for.
inline constexpr int64_t kMostSlots = 1'000'000;
inline constexpr size_t kMostInstructions = 1'000'000;
inline constexpr size_t kMostNames = 100'000;
inline constexpr int64_t kMostIndex = 1'000'000;
inline constexpr int64_t kMostElements = int64_t{1} << 40;  // of a tensor

// The dtype of this name, "float32". Throws Error if it is unknown.
at::ScalarType read_dtype(const JsonNode& node);

// The entry of {"size": 3}; none if the value is something else. With `whole`, the entry may not be real.
std::optional<size_t> find_size(const JsonNode& node, const Sizes* sizes, bool whole);

// A number where an operator takes a tensor.
c10::IValue wrapped_number(const at::Scalar& number);

// What the instructions of a code may do.
struct CodeRules {
  int slots = 0;                 // of the program
  bool gradients = false;        // they may add to gradients
  bool random = false;           // they may call for random numbers
  int64_t positions = 0;         // of a sequence, for numbers that depend on them; 0: no number may
  const Sizes* sizes = nullptr;  // those that numbers may be; null: none
};

// Reads a list of instructions. Every operator is on the list of operators.h, and every argument is of its type and
// every slot in range. Whether slots are written before they are read is not checked here.
Code read_code(const JsonNode& list, const CodeRules& rules);

// A program of the shape, whose `fields`, `sizes` and `positions` have been read. Throws Error.
Program read_program(const JsonNode& node, const Shape& shape);

// What counts the targets of a micro-batch of the shape. Throws Error.
Targets read_targets(const JsonNode& node, const Shape& shape);

// A table of the shape. Throws Error.
Table read_table(const JsonNode& node, const Shape& shape);

}  // namespace twobp::graph
