// Biases: added to every row of a matrix, and their gradients, sums over its rows in blocks of fixed size, so
// that threads do not change a bit.
#pragma once

#include <ATen/ATen.h>

namespace twobp {

// sum (cols) += the rows of `matrix` (rows, cols), of any float dtype; `sum` of compute_type of it.
void add_sum_of_rows(at::Tensor& sum, const at::Tensor& matrix);

// Each row of `matrix` (rows, cols), contiguous, += row (cols), of compute_type of it.
void add_row(at::Tensor& matrix, const at::Tensor& row);

}  // namespace twobp
