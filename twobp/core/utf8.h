// The characters of a text in UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace twobp {

struct Character {
  uint32_t code = 0;
  size_t bytes = 0;  // 0: the byte begins no character
};

// Decodes the character at the begin of `text`, which is not empty. Rejects forms that are too long, surrogates, and
// codes above the last one.
Character first_character(std::string_view text);

}  // namespace twobp
