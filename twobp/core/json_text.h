// JSON that came from elsewhere: what nests too deep, is too long or says the same key twice is refused, with
// one message that names where it came from.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace twobp {

// `origin` names the text in messages. For nlohmann::json and nlohmann::ordered_json. Throws Error: not JSON,
// a key given twice, nested deeper than `max_depth`.
template <typename Json>
Json parse_json(std::string_view text, const std::string& origin, int max_depth);

extern template nlohmann::json parse_json(std::string_view text, const std::string& origin, int max_depth);
extern template nlohmann::ordered_json parse_json(std::string_view text, const std::string& origin,
                                                  int max_depth);

// A whole file. Throws Error: missing, a folder, unreadable, longer than `max_bytes` (no more of it is read).
std::string read_text(const std::string& path, uint64_t max_bytes);

}  // namespace twobp
