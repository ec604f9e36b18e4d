#include "twobp/graph/json_node.h"

namespace twobp::graph {

JsonNode JsonNode::operator[](const char* key) const {
  auto found = find(key);
  if (!found) refuse("there is no \"", key, "\"");
  return *std::move(found);
}

std::optional<JsonNode> JsonNode::find(const char* key) const {
  if (!value_.is_object()) refuse("is not an object");
  const auto found = value_.find(key);
  if (found == value_.end()) return std::nullopt;
  return JsonNode(*found, origin_, place_.empty() ? key : place_ + "." + key);
}

std::vector<JsonNode> JsonNode::elements(size_t most) const {
  if (!value_.is_array()) refuse("is not a list");
  if (value_.size() > most) refuse("has ", value_.size(), " elements, more than the ", most, " that are allowed");
  std::vector<JsonNode> all;
  all.reserve(value_.size());
  for (const auto& one : value_) all.emplace_back(one, origin_, concat(place_, "[", all.size(), "]"));
  return all;
}

std::vector<std::pair<std::string, JsonNode>> JsonNode::members(size_t most) const {
  if (!value_.is_object()) refuse("is not an object");
  if (value_.size() > most) refuse("has ", value_.size(), " members, more than the ", most, " that are allowed");
  std::vector<std::pair<std::string, JsonNode>> all;
  for (const auto& [key, one] : value_.items()) {
    if (key.empty() || key.size() > 1000) refuse("has a name of ", key.size(), " bytes");
    all.emplace_back(key, JsonNode(one, origin_, concat(place_, ".", key)));
  }
  return all;
}

int64_t JsonNode::integer(int64_t least, int64_t most) const {
  if (!value_.is_number_integer()) refuse("is not a whole number");
  const bool huge = value_.is_number_unsigned() && value_.get<uint64_t>() > INT64_MAX;
  const int64_t number = huge ? INT64_MAX : value_.get<int64_t>();
  if (huge || number < least || number > most) refuse("is ", value_.dump(), ", outside ", least, " to ", most);
  return number;
}

bool JsonNode::boolean() const {
  if (!value_.is_boolean()) refuse("is neither true nor false");
  return value_.get<bool>();
}

const std::string& JsonNode::text() const {
  if (!value_.is_string()) refuse("is not a text");
  const auto& text = value_.get_ref<const std::string&>();
  if (text.size() > 1000) refuse("is a text of ", text.size(), " bytes, more than 1000");
  return text;
}

}  // namespace twobp::graph
