// Parses JSON from outside. Text that is nested too deep, is too long or repeats a key is rejected, with one message
// that names its origin.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace twobp {

// `origin` names the text in messages. For nlohmann::json and nlohmann::ordered_json. Throws Error for text that is not
// JSON, a repeated key, or nesting deeper than `max_depth`.
template <typename Json>
Json parse_json(std::string_view text, const std::string& origin, int max_depth);

extern template nlohmann::json parse_json(std::string_view text, const std::string& origin, int max_depth);
extern template nlohmann::ordered_json parse_json(std::string_view text, const std::string& origin, int max_depth);

}  // namespace twobp
