// Sizes in the configuration in human notation.
#pragma once

#include <cstdint>
#include <string>

namespace twobp {

// "512MiB", "2GiB", "1000000" -> bytes. Returns -1 for text that is not a size, including sizes between 0 and 1 byte.
int64_t parse_bytes(const std::string& text);

}  // namespace twobp
