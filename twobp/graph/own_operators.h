// Operators of our own, "twobp::...", that a captured program may call beside ATen's. docs/bundle.md lists them. Each
// throws Error for arguments that do not fit, since programs are untrusted.
#pragma once

#include <span>

#include "twobp/graph/operators.h"

namespace twobp {
class Parameter;
}

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

// Attention: of packed rows, and of q, k and v apart. Over a slice of the sequences, it reads keys and values of
// earlier slices (nn/layers/attention_inputs.h).
std::span<const OwnOperator> attention_operators();
// Operators of ATen, by name alone, that a GPU computes in another way.
std::span<const OwnOperator> replaced_attention_operators();

// Products with weights of 4 bits a number. The weight is dequantised for each product, so that nothing but the 4 bits
// stays.
std::span<const OwnOperator> four_bit_operators();

// Products of groups of rows with a matrix each. Mixtures of experts have them.
std::span<const OwnOperator> group_operators();
// Gradient of `parameter` (groups, n, m): matrix g += a[rows of group g]^T @ b[rows of group g], a (rows, n), b (rows,
// m). `ends` (groups) has the index after the last row of each group. Throws Error for arguments that do not fit.
void add_group_products(Parameter& parameter, const at::Tensor& a, const at::Tensor& b, const at::Tensor& ends);

inline bool is_wide(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
}

// Throws Error if cos and sin are no tables of rotary embedding. `head_dim` numbers turn in pairs.
void check_tables(const at::Tensor& cos, const at::Tensor& sin, int64_t positions, int64_t head_dim,
                  at::ScalarType dtype);

}  // namespace twobp::graph
