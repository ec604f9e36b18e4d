// A value of an untrusted JSON file, which knows its place there. Every function throws Error that names file and place
// if the value is of another kind.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"

namespace twobp::graph {

class JsonNode {
 public:
  // `place`: "shapes[0].fields"; empty for the whole file.
  JsonNode(const nlohmann::json& value, std::string origin, std::string place)
      : value_(value), origin_(std::move(origin)), place_(std::move(place)) {}

  template <typename... Args>
  [[noreturn]] void refuse(const Args&... args) const {
    fail(origin_, ": ", place_, place_.empty() ? "" : ": ", args...);
  }

  const nlohmann::json& value() const { return value_; }
  const std::string& place() const { return place_; }

  JsonNode operator[](const char* key) const;
  std::optional<JsonNode> find(const char* key) const;  // none: missing
  bool has(const char* key) const { return find(key).has_value(); }
  std::vector<JsonNode> elements(size_t most) const;
  std::vector<std::pair<std::string, JsonNode>> members(size_t most) const;
  // A whole number from `least` to `most`.
  int64_t integer(int64_t least, int64_t most) const;
  bool boolean() const;
  // A text of up to 1000 bytes.
  const std::string& text() const;

 private:
  const nlohmann::json& value_;
  std::string origin_;
  std::string place_;
};

}  // namespace twobp::graph
