// Small helpers for messages: sizes, durations, and the nearest known name to a mistyped one.
#pragma once

#include <cstddef>
#include <cstdint>
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

}  // namespace twobp
