// Text: helpers for messages (sizes, durations, the nearest known name to a mistyped one), patterns, figures, UTF-8,
// and the text of files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace twobp {

// "1.5 GiB", "12.0 MiB", "813 B".
std::string format_bytes(double bytes);

// "1h02m", "3m05s", "12.3s", "45ms".
std::string format_seconds(double seconds);

// The candidate with the smallest edit distance to `name`; empty if there is none.
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);

// The place of `name` in `names`. If it has none, throws Error: unknown `what`, did you mean the nearest?
size_t index_of_name(std::string_view what, std::string_view name, const std::vector<std::string>& names);

// "a, b, c".
std::string join(const std::vector<std::string>& parts, std::string_view separator = ", ");

// The parts of `text` between separators; empty parts are kept.
std::vector<std::string> split(std::string_view text, char separator);

// The characters of a text in UTF-8.
struct Character {
  uint32_t code = 0;
  size_t bytes = 0;  // 0: the byte begins no character
};

// Decodes the character at the begin of `text`, which is not empty. Rejects forms that are too long, surrogates, and
// codes above the last one.
Character first_character(std::string_view text);

// Makes untrusted text (names in files, messages of other processes) harmless for a terminal.

// The text with its control characters as escapes: "\n", "\x1b", "\u{202e}". This covers C0 and C1, the characters that
// change the direction or the line of text, and bytes that are not UTF-8.
std::string printable(std::string_view text);

// The same, but newlines and tabs stay.
std::string printable_lines(std::string_view text);

// Regular expressions of POSIX (regex.h, extended). <regex> takes seconds of compile time in every file.
class Pattern {
 public:
  // Throws Error if `expression` is not valid.
  explicit Pattern(const std::string& expression);

  // The whole of `text` and its groups, from 1 (an optional group without a match is empty), if all of `text` matches;
  // otherwise nothing. Text that contains a zero byte does not match.
  std::vector<std::string> match(const std::string& text) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

// Numbers as text, for messages and tables.

// An unknown number: NaN, "-" in text, null in JSON.
inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string number(double value);             // five significant digits
std::string fixed(double value, int digits);  // digits after the point; "-" for kUnknown
std::string percent(double fraction);         // "12.3 %"
std::string milliseconds(double seconds);     // "1.234 ms"; from 10 ms on "12.3 ms"

// Whole files of text.

// Throws Error if the file is missing, unreadable, no regular file, or longer than `max_bytes` (no more of it is read).
// Streams that the program was given may be read: /dev/stdin, or <(...) of a shell.
std::string read_text(const std::string& path, uint64_t max_bytes);

// Replaces the file. For results: a file that must stay whole if this fails is a NewFile. Throws Error that names the
// file.
void write_text(const std::string& path, const std::string& text);

}  // namespace twobp
