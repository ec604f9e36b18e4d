// JSON of files that came from elsewhere: size, depth and duplicate keys are checked, every failure is an
// Error that names the file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace twobp {

// An object. `origin` names the text in messages. Throws Error: not JSON, not an object, a key given twice,
// nested deeper than `max_depth`.
nlohmann::json parse_json_object(std::string_view text, const std::string& origin, int max_depth);

// A file with one. Throws Error: also missing, unreadable, larger than `max_bytes`.
nlohmann::json read_json_object(const std::string& path, int max_depth, uint64_t max_bytes = 16 << 20);

}  // namespace twobp
