#include "twobp/core/printable.h"

#include <array>
#include <cstdint>
#include <cstdio>

#include "twobp/core/utf8.h"

namespace twobp {
namespace {

bool is_control(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code <= 0x9f) ||  // C0, DEL, C1
         code == 0x61c || code == 0x200e || code == 0x200f || (code >= 0x202a && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069) ||  // direction
         code == 0x2028 || code == 0x2029;      // line and paragraph
}

std::string escape(uint32_t code) {
  if (code == '\n') return "\\n";
  if (code == '\t') return "\\t";
  if (code == '\r') return "\\r";
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), code < 0x80 ? "\\x%02x" : "\\u{%x}", code);
  return text.data();
}

std::string escaped(std::string_view text, bool lines) {
  std::string out;
  while (!text.empty()) {
    const Character character = first_character(text);
    if (character.bytes == 0) {
      std::array<char, 8> byte{};
      std::snprintf(byte.data(), byte.size(), "\\x%02x", static_cast<unsigned char>(text[0]));
      out += byte.data();
      text.remove_prefix(1);
      continue;
    }
    const bool stays = lines && (character.code == '\n' || character.code == '\t');
    if (is_control(character.code) && !stays) {
      out += escape(character.code);
    } else {
      out += text.substr(0, character.bytes);
    }
    text.remove_prefix(character.bytes);
  }
  return out;
}

}  // namespace

std::string printable(std::string_view text) {
  return escaped(text, false);
}

std::string printable_lines(std::string_view text) {
  return escaped(text, true);
}

}  // namespace twobp
