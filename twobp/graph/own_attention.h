// Attention as operators of our own: of packed rows, and of q, k and v apart. Over a slice of the sequences, it reads
// keys and values of earlier slices (nn/layers/attention_inputs.h).
#pragma once

#include <span>

#include "twobp/graph/own_operators.h"

namespace twobp::graph {

std::span<const OwnOperator> attention_operators();
// Operators of ATen, by name alone, that a GPU computes in another way.
std::span<const OwnOperator> replaced_attention_operators();

}  // namespace twobp::graph
