#include "twobp/core/json.h"

#include <cmath>

#include "twobp/core/text.h"

namespace twobp {
namespace {

// The library's own message, without its tag and without quoting a whole file.
std::string reason(const nlohmann::json::exception& error) {
  constexpr size_t kLongest = 200;
  std::string what = error.what();
  const size_t tag = what.find("] ");
  if (tag != std::string::npos) what = what.substr(tag + 2);
  return what.size() <= kLongest ? what : what.substr(0, kLongest) + "...";
}

}  // namespace

template <typename Json>
Json parse_json(std::string_view text, const std::string& origin, int max_depth) {
  using Event = typename Json::parse_event_t;
  std::vector<std::set<std::string>> open;  // the keys of the objects that are still open
  const auto check = [&](int depth, Event event, Json& parsed) {
    TWOBP_CHECK(depth <= max_depth, origin, ": nested deeper than ", max_depth, " levels");
    if (event == Event::object_start) open.emplace_back();
    if (event == Event::object_end) open.pop_back();
    if (event == Event::key) {
      const auto& name = parsed.template get_ref<const std::string&>();
      TWOBP_CHECK(open.back().insert(name).second, origin, ": \"", name.substr(0, 100), "\" is there twice");
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check);
  } catch (const nlohmann::json::exception& error) {
    fail(origin, ": not JSON: ", reason(error));
  }
}

template nlohmann::json parse_json(std::string_view text, const std::string& origin, int max_depth);
template nlohmann::ordered_json parse_json(std::string_view text, const std::string& origin, int max_depth);

template <typename Json>
Json parse_json_object(std::string_view text, const std::string& origin, int max_depth) {
  Json root = parse_json<Json>(text, origin, max_depth);
  TWOBP_CHECK(root.is_object(), origin, ": not a JSON object");
  return root;
}

template nlohmann::json parse_json_object(std::string_view text, const std::string& origin, int max_depth);
template nlohmann::ordered_json parse_json_object(std::string_view text, const std::string& origin, int max_depth);

std::string JsonNode::shown() const {
  constexpr size_t kLongest = 40;
  if (value_.is_structured()) return value_.is_array() ? "a list" : "an object";
  const std::string text = value_.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

JsonNode JsonNode::operator[](const char* key) const {
  auto found = find(key);
  if (!found) refuse("there is no \"", key, "\"");
  return *std::move(found);
}

std::optional<JsonNode> JsonNode::find(const char* key) const {
  if (!value_.is_object()) refuse("is not an object, but ", shown());
  const auto found = value_.find(key);
  if (found == value_.end()) return std::nullopt;
  return JsonNode(*found, origin_, place_.empty() ? key : place_ + "." + key);
}

std::vector<JsonNode> JsonNode::elements(size_t most) const {
  if (!value_.is_array()) refuse("is not a list, but ", shown());
  if (value_.size() > most) refuse("has ", value_.size(), " elements, more than the ", most, " that are allowed");
  std::vector<JsonNode> all;
  all.reserve(value_.size());
  for (const auto& one : value_) all.emplace_back(one, origin_, concat(place_, "[", all.size(), "]"));
  return all;
}

std::vector<std::pair<std::string, JsonNode>> JsonNode::members(size_t most) const {
  if (!value_.is_object()) refuse("is not an object, but ", shown());
  if (value_.size() > most) refuse("has ", value_.size(), " members, more than the ", most, " that are allowed");
  std::vector<std::pair<std::string, JsonNode>> all;
  for (const auto& [key, one] : value_.items()) {
    if (key.empty() || key.size() > 1000) refuse("has a name of ", key.size(), " bytes");
    all.emplace_back(key, JsonNode(one, origin_, place_.empty() ? key : place_ + "." + key));
  }
  return all;
}

void JsonNode::has_only(const std::set<std::string>& known) const {
  for (const auto& [key, one] : members()) {
    if (known.contains(key)) continue;
    refuse("has an unknown field \"", key, "\": its fields are ", join({known.begin(), known.end()}));
  }
}

int64_t JsonNode::integer(int64_t least, int64_t most) const {
  if (!value_.is_number_integer()) refuse("is not a whole number, but ", shown());
  const bool huge = value_.is_number_unsigned() && value_.get<uint64_t>() > INT64_MAX;
  const int64_t number = huge ? INT64_MAX : value_.get<int64_t>();
  if (huge || number < least || number > most) refuse("is ", value_.dump(), ", outside ", least, " to ", most);
  return number;
}

double JsonNode::number() const {
  if (!value_.is_number() || !std::isfinite(value_.get<double>())) refuse("is not a finite number, but ", shown());
  return value_.get<double>();
}

bool JsonNode::boolean() const {
  if (!value_.is_boolean()) refuse("is neither true nor false, but ", shown());
  return value_.get<bool>();
}

const std::string& JsonNode::text() const {
  if (!value_.is_string()) refuse("is not a text, but ", shown());
  const auto& text = value_.get_ref<const std::string&>();
  if (text.size() > 1000) refuse("is a text of ", text.size(), " bytes, more than 1000");
  return text;
}

}  // namespace twobp
