#include "twobp/core/figures.h"

#include <cmath>
#include <iomanip>
#include <sstream>

namespace twobp {

std::string number(double value) {
  std::ostringstream out;
  out << std::setprecision(5) << value;
  return out.str();
}

std::string fixed(double value, int digits) {
  if (std::isnan(value)) return "-";
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  const std::string text = out.str();
  const bool zero = text.find_first_of("123456789") == std::string::npos && std::isfinite(value);
  return zero && text.front() == '-' ? text.substr(1) : text;  // no "-0.0"
}

std::string percent(double fraction) {
  return fixed(100 * fraction, 1) + " %";
}

std::string milliseconds(double seconds) {
  return fixed(1e3 * seconds, seconds < 0.01 ? 3 : 1) + " ms";
}

}  // namespace twobp
