// Messages of the program, on standard error. They have their own file because LibTorch's headers bring
// another version of the formatting library that spdlog uses.
#pragma once

#include <string>

namespace twobp {

void log_error(const std::string& message);
void log_warning(const std::string& message);

}  // namespace twobp
