// Matrix products of any dtype. A CPU without instructions for reduced precision would take several times as long as in
// float32. There the operands are widened first, which never rounds more.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// Whether this CPU multiplies numbers of this dtype without widening them first. Always true for float32 and float64.
bool has_instructions_for(at::ScalarType dtype);

// The dtype in which matrix products of `dtype` are computed on this CPU: `dtype` itself or float32.
at::ScalarType product_type(at::ScalarType dtype);
// The dtype for products with this tensor: as above on a CPU, the tensor's own on a GPU.
at::ScalarType product_type(const at::Tensor& tensor);

// y = a @ b: a (rows, n), b (n, cols), y (rows, cols).
void multiply_into(at::Tensor& y, const at::Tensor& a, const at::Tensor& b);
// y = a @ b + row: `row` (cols) has y's dtype, or float32 if y has reduced precision.
void multiply_and_add(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, const at::Tensor& row);
// y = y + scale a @ b.
void multiply_add(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, double scale = 1);

}  // namespace twobp
