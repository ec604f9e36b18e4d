// Operators of our own, "twobp::...", that a captured program may call beside ATen's. docs/bundle.md lists them. Each
// throws Error for arguments that do not fit, since programs are untrusted.
#pragma once

#include <span>

#include "twobp/graph/operators.h"

namespace twobp::graph {

// The last `arguments` tensors of the stack become contiguous.
void make_contiguous(Stack& stack, size_t arguments);

struct OwnOperator {
  const char* schema;  // an argument `int random` is a key that tells random calls apart
  void (*run)(Stack& stack);
  void (*of_slice)(Stack& stack, const SliceCall& slice) = nullptr;  // if slices are computed in another way
};

std::span<const OwnOperator> own_operators();

// Operators of ATen, by name alone, that we compute in another way: products by our kernels, norms with
// equal layouts, gradients of convolutions over tiny images, attention for CPUs on a GPU.
std::span<const OwnOperator> replaced_operators();

}  // namespace twobp::graph
