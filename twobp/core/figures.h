// Numbers as text, for messages and tables.
#pragma once

#include <limits>
#include <string>

namespace twobp {

// An unknown number: NaN, "-" in text, null in JSON.
inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string number(double value);             // five significant digits
std::string fixed(double value, int digits);  // digits after the point; "-" for kUnknown
std::string percent(double fraction);         // "12.3 %"
std::string milliseconds(double seconds);     // "1.234 ms"; from 10 ms on "12.3 ms"

}  // namespace twobp
