// What LibTorch's kernels rely on without checking it. Autograd passes them nothing else, but a bundle could, and they
// would read or write outside their tensors, or give what was in memory before. tests/graph/operator_sweep looks for
// operators that need a check.
#pragma once

#include <string_view>

#include "twobp/graph/checked_call.h"

namespace twobp::graph {

// Checks the arguments of a call. Throws Error. May replace a tensor by one with other strides.
using ArgumentCheck = void (*)(CheckedCall& call);

// The check of ATen's operator of this name and overload, "median.dim"; null if it checks its arguments itself.
ArgumentCheck find_check(std::string_view name);

}  // namespace twobp::graph
