// Messages of the program, on standard error, in one line each: control characters are shown as escapes. They
// have their own file because LibTorch's headers bring another version of the formatting library that spdlog
// uses.
#pragma once

#include <string>

namespace twobp {

// Off where no person watches. Otherwise colors are used on a terminal.
void log_in_color(bool color);
void log_error(const std::string& message);
void log_warning(const std::string& message);

}  // namespace twobp
