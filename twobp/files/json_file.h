// JSON from untrusted files. Size, depth and duplicate keys are checked, and every Error names the file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace twobp {

// Parses an object, also as a nlohmann::ordered_json. `origin` names the text in messages. Throws Error if it is not
// JSON or not an object, has a key twice, or is nested deeper than `max_depth`.
template <typename Json = nlohmann::json>
Json parse_json_object(std::string_view text, const std::string& origin, int max_depth);

extern template nlohmann::json parse_json_object(std::string_view text, const std::string& origin, int max_depth);
extern template nlohmann::ordered_json parse_json_object(std::string_view text, const std::string& origin,
                                                         int max_depth);

// Reads a file with an object. Also throws Error if the file is missing, unreadable, or larger than `max_bytes`.
nlohmann::json read_json_object(const std::string& path, int max_depth, uint64_t max_bytes = 16 << 20);

}  // namespace twobp
