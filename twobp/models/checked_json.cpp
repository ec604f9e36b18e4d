#include "twobp/models/checked_json.h"

#include <limits>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"

namespace twobp {

using nlohmann::json;

std::string shown(const json& value) {
  constexpr size_t kLongest = 100;
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

const json* CheckedJson::find(const char* key) const {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const json& CheckedJson::require(const char* key) const {
  const json* value = find(key);
  TWOBP_CHECK(value, origin, ": has no ", key);
  return *value;
}

int64_t CheckedJson::integer(const char* key) const {
  const json& value = require(key);
  // A number that does not fit is larger than any sensible value; the ranges are checked later.
  TWOBP_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX, origin, ": ", key, " is ", shown(value),
              ", not an integer from 0");
  return value.get<int64_t>();
}

std::vector<int> CheckedJson::integers(const char* key) const {
  const json& list = require(key);
  TWOBP_CHECK(list.is_array(), origin, ": ", key, " is ", shown(list), ", not a list of integers");
  std::vector<int> values;
  for (const json& value : list) {
    TWOBP_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= std::numeric_limits<int>::max(), origin, ": ",
                key, " has ", shown(value), ", not an integer from 0");
    values.push_back(value.get<int>());
  }
  return values;
}

std::vector<double> CheckedJson::numbers(const char* key) const {
  const json& list = require(key);
  TWOBP_CHECK(list.is_array(), origin, ": ", key, " is ", shown(list), ", not a list of numbers");
  std::vector<double> values;
  for (const json& value : list) {
    TWOBP_CHECK(value.is_number(), origin, ": ", key, " has ", shown(value), ", not a number");
    values.push_back(value.get<double>());
  }
  return values;
}

double CheckedJson::number(const char* key) const {
  const json& value = require(key);
  TWOBP_CHECK(value.is_number(), origin, ": ", key, " is ", shown(value), ", not a number");
  return value.get<double>();
}

bool CheckedJson::boolean(const char* key, bool otherwise) const {
  const json* value = find(key);
  TWOBP_CHECK(!value || value->is_boolean(), origin, ": ", key, " is ", shown(*value), ", not true or false");
  return value ? value->get<bool>() : otherwise;
}

std::string CheckedJson::text(const char* key, const std::string& otherwise) const {
  const json* value = find(key);
  TWOBP_CHECK(!value || value->is_string(), origin, ": ", key, " is ", shown(*value), ", not a text");
  return value ? value->get<std::string>() : otherwise;
}

void CheckedJson::require_false(const char* key) const {
  TWOBP_CHECK(!boolean(key, false), origin, ": ", key, " true is not supported: false is");
}

}  // namespace twobp
