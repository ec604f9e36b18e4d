// Products of groups of rows with a matrix each, as operators of our own. Mixtures of experts have them.
#pragma once

#include <span>

#include <ATen/ATen.h>

#include "twobp/graph/own_operators.h"

namespace twobp {
class Parameter;
}

namespace twobp::graph {

std::span<const OwnOperator> group_operators();

// Gradient of `parameter` (groups, n, m): matrix g += a[rows of group g]^T @ b[rows of group g], a (rows, n), b (rows,
// m). `ends` (groups) has the index after the last row of each group. Throws Error for arguments that do not fit.
void add_group_products(Parameter& parameter, const at::Tensor& a, const at::Tensor& b, const at::Tensor& ends);

}  // namespace twobp::graph
