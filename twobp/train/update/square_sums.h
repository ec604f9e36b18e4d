// Sums of squares of gradients. They are exact sums of the squares of blocks (kSquareBlock), so that the norm has the
// same bits however ranks and replicas share the weights.
//
// A sum is a row of digits: whole numbers, to be added one by one, of which digit i counts 2^(kLowest + kBits i).
// Squares below are left out, and those beyond count as not finite.
#pragma once

#include <vector>

#include <ATen/ATen.h>

namespace twobp {

inline constexpr int kSquareDigits = 19;

// Zeros: (rows, digits), float64.
at::Tensor square_sums(int64_t rows);
// Adds the squares of dense tensors, each to one row. The host waits for a device once.
void add_squares(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& rows, at::Tensor& sums);
// Adds a number of at least 0, or one that is not finite, to a row.
void add_exactly(double number, double* digits);
// The sums by row.
std::vector<double> values_of(const at::Tensor& sums);

}  // namespace twobp
