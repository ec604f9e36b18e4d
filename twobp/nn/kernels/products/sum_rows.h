// Biases: adding them to every row of a matrix, and computing their gradients, which are sums over rows. Sums go in
// blocks of fixed size, so that the number of threads does not change a bit.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// sum (cols) += the rows of `matrix` (rows, cols). `matrix` has any float dtype, and `sum` has its compute_type.
void add_sum_of_rows(at::Tensor& sum, const at::Tensor& matrix);

// Each row of `matrix` (rows, cols), contiguous, += row (cols). `row` has the compute_type of `matrix`.
void add_row(at::Tensor& matrix, const at::Tensor& row);

}  // namespace twobp
