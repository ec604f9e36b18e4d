// Products with weights of 4 bits a number, as operators of our own. The weight is dequantised for each product, so
// that nothing but the 4 bits stays.
#pragma once

#include <span>

#include "twobp/graph/own_operators.h"

namespace twobp::graph {

std::span<const OwnOperator> four_bit_operators();

}  // namespace twobp::graph
