// Numbers as text, for messages and tables.
#pragma once

#include <string>

namespace twobp {

std::string number(double value);             // five significant digits
std::string fixed(double value, int digits);  // behind the point; "-" of NaN, which nobody knows
std::string percent(double fraction);         // "12.3 %"
std::string milliseconds(double seconds);     // "1.234 ms", from 10 ms on "12.3 ms"

}  // namespace twobp
