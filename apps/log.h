// Prints messages of the program on standard error, in one line each. Control characters are shown as escapes. This
// file is separate because LibTorch's headers bring another version of the formatting library that spdlog uses.
#pragma once

#include <string>

namespace twobp {

// Turns colors on or off. They are off if no person watches, and otherwise on if the output is a terminal.
void log_in_color(bool color);
void log_error(const std::string& message);
void log_warning(const std::string& message);

}  // namespace twobp
