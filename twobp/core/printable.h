// Makes untrusted text (names in files, messages of other processes) harmless for a terminal.
#pragma once

#include <string>
#include <string_view>

namespace twobp {

// The text with its control characters as escapes: "\n", "\x1b", "\u{202e}". This covers C0 and C1, the characters that
// change the direction or the line of text, and bytes that are not UTF-8.
std::string printable(std::string_view text);

// The same, but newlines and tabs stay.
std::string printable_lines(std::string_view text);

}  // namespace twobp
