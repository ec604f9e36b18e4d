// Sizes in the configuration, as people write them.
#pragma once

#include <cstdint>
#include <string>

namespace twobp {

// "512MiB", "2GiB", "1000000" -> bytes; -1: not a size. Less than a byte is no size either, unless it is 0.
int64_t parse_bytes(const std::string& text);

}  // namespace twobp
