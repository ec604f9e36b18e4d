// Matrix products of any dtype. A CPU without instructions for reduced precision would take several times as
// long as in float32 for them; there the operands are widened first, which rounds less and never more.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// Whether this CPU multiplies numbers of this dtype without widening them first: always float32 and float64.
bool has_instructions_for(at::ScalarType dtype);

// The dtype that matrix products of `dtype` are computed in here: itself, or float32.
at::ScalarType product_type(at::ScalarType dtype);
// Of products with this tensor: as above on a CPU, its own on a GPU.
at::ScalarType product_type(const at::Tensor& tensor);

// y = a @ b: a (rows, n), b (n, cols), y (rows, cols).
void multiply_into(at::Tensor& y, const at::Tensor& a, const at::Tensor& b);
// y = a @ b + row: `row` (cols) of y's dtype, or float32 where that is reduced.
void multiply_and_add(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, const at::Tensor& row);
// y = y + scale a @ b.
void multiply_add(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, double scale = 1);

}  // namespace twobp
