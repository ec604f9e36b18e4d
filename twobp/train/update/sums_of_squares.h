// Sums of squares of gradients, by layer of the model.
#pragma once

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

namespace twobp {

inline bool all_finite(const at::Tensor& squares) {
  const double* values = squares.const_data_ptr<double>();
  return std::all_of(values, values + squares.numel(), [](double value) { return std::isfinite(value); });
}

// The norm of all gradients.
inline double norm_of(const at::Tensor& squares) {
  double sum = 0;
  for (int64_t i = 0; i < squares.numel(); ++i) sum += squares.const_data_ptr<double>()[i];
  return std::sqrt(sum);
}

}  // namespace twobp
