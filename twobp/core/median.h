// The median of measurements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace twobp {

// Of at least one number; of an even count the mean of the middle two.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

}  // namespace twobp
