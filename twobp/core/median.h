// The median of measurements.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace twobp {

// Takes at least one number. For an even count, returns the mean of the middle two. NaN if one of them is NaN.
inline double median(std::vector<double> values) {
  const auto unknown = std::find_if(values.begin(), values.end(), [](double value) { return std::isnan(value); });
  if (unknown != values.end()) return *unknown;
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

}  // namespace twobp
