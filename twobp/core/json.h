// JSON from outside. Text that is nested too deep, is too long or repeats a key is rejected, and so is a
// value of another kind than expected, each with one message that names the origin and the place.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"

namespace twobp {

// `origin` names the text in messages. For nlohmann::json and nlohmann::ordered_json. Throws Error for text
// that is not JSON, a repeated key, or nesting deeper than `max_depth`.
template <typename Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& origin, int max_depth);
// The same for an object.
template <typename Json = nlohmann::json>
Json parse_json_object(std::string_view text, const std::string& origin, int max_depth);

extern template nlohmann::json parse_json(std::string_view text, const std::string& origin, int max_depth);
extern template nlohmann::ordered_json parse_json(std::string_view text, const std::string& origin, int max_depth);
extern template nlohmann::json parse_json_object(std::string_view text, const std::string& origin, int max_depth);
extern template nlohmann::ordered_json parse_json_object(std::string_view text, const std::string& origin,
                                                         int max_depth);

// A value that knows its place in the text. Every function throws Error that names text and place if the
// value is of another kind.
class JsonNode {
 public:
  // `place`: "shapes[0].fields"; empty for the whole text. The value must outlive the node.
  JsonNode(const nlohmann::json& value, std::string origin, std::string place = "")
      : value_(value), origin_(std::move(origin)), place_(std::move(place)) {}

  template <typename... Args>
  [[noreturn]] void refuse(const Args&... args) const {
    fail(origin_, ": ", place_, place_.empty() ? "" : ": ", args...);
  }

  const nlohmann::json& value() const { return value_; }
  const std::string& place() const { return place_; }
  // The value in messages: "an object", or its text, which is cut if it is long.
  std::string shown() const;

  JsonNode operator[](const char* key) const;
  std::optional<JsonNode> find(const char* key) const;  // none: missing
  bool has(const char* key) const { return find(key).has_value(); }
  std::vector<JsonNode> elements(size_t most = 1 << 20) const;
  std::vector<std::pair<std::string, JsonNode>> members(size_t most = 1 << 20) const;
  // Refuses other members than these: one that is misspelt would be passed over if it may be missing.
  void has_only(const std::set<std::string>& known) const;
  // A whole number from `least` to `most`.
  int64_t integer(int64_t least, int64_t most) const;
  // A finite number.
  double number() const;
  bool boolean() const;
  // A text of up to 1000 bytes.
  const std::string& text() const;

 private:
  const nlohmann::json& value_;
  std::string origin_;
  std::string place_;
};

}  // namespace twobp
