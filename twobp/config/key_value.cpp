#include "twobp/config/key_value.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <type_traits>
#include <utility>
#include <variant>

#include "twobp/config/section.h"
#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

using Json = nlohmann::ordered_json;

// Assigns a JSON value to a key's field. Returns false if the type or size does not fit.
struct Assign {
  const Json& value;

  template <typename Integer>
  static bool integer(const Json& from, Integer& to) {
    if (from.is_number_unsigned()) {
      const auto number = from.get<uint64_t>();
      if (!std::in_range<Integer>(number)) return false;
      to = static_cast<Integer>(number);
      return true;
    }
    if (!from.is_number_integer()) return false;
    const auto number = from.get<int64_t>();
    if (!std::in_range<Integer>(number)) return false;
    to = static_cast<Integer>(number);
    return true;
  }

  bool operator()(int* to) const { return integer(value, *to); }
  bool operator()(int64_t* to) const { return integer(value, *to); }
  bool operator()(uint64_t* to) const { return integer(value, *to); }
  bool operator()(bool* to) const {
    if (value.is_boolean()) *to = value.get<bool>();
    return value.is_boolean();
  }
  bool operator()(double* to) const {
    if (value.is_number()) *to = value.get<double>();
    return value.is_number();
  }
  bool operator()(std::string* to) const {
    if (value.is_string()) *to = value.get<std::string>();
    return value.is_string();
  }
  bool operator()(Choice* /*to*/) const { return value.is_string(); }  // choose() assigns it
  bool operator()(std::vector<int>* to) const {
    if (!value.is_array()) return false;
    std::vector<int> items(value.size());
    for (size_t i = 0; i < items.size(); ++i) {
      if (!integer(value[i], items[i])) return false;
    }
    *to = std::move(items);
    return true;
  }
  bool operator()(std::vector<double>* to) const {
    if (!value.is_array()) return false;
    std::vector<double> items;
    for (const Json& item : value) {
      if (!item.is_number()) return false;
      items.push_back(item.get<double>());
    }
    *to = std::move(items);
    return true;
  }
  bool operator()(std::vector<std::string>* to) const {
    if (!value.is_array()) return false;
    std::vector<std::string> items;
    for (const Json& item : value) {
      if (!item.is_string()) return false;
      items.push_back(item.get<std::string>());
    }
    *to = std::move(items);
    return true;
  }
};

template <typename Integer>
std::string range_of() {
  return concat(" from ", std::numeric_limits<Integer>::min(), " to ", std::numeric_limits<Integer>::max());
}

// The first item of a list that does not fit; null if `value` is no list.
template <typename List>
const Json* misfit(const List& /*to*/, const Json& value) {
  if constexpr (!std::is_same_v<List, std::string>) {
    if (!value.is_array()) return nullptr;
    for (const Json& item : value) {
      typename List::value_type scratch;
      if (!Assign{item}(&scratch)) return &item;
    }
  }
  return nullptr;
}

// "an integer", "text". For an integer that is too large also its range.
std::string expectation(const Key& key, const Field& field, const Json& value) {
  return std::visit(
      [&](auto* to) -> std::string {
        using Value = std::remove_pointer_t<decltype(to)>;
        if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>) {
          if (!value.is_number_integer()) return "an integer";
          return "an integer" + range_of<Value>();
        } else if constexpr (std::is_same_v<Value, std::vector<int>>) {
          const Json* item = misfit(*to, value);
          return item != nullptr && item->is_number_integer() ? "integers" + range_of<int>() : "a list of integers";
        } else {
          return concat(key.type == "text" ? "" : "a ", key.type);
        }
      },
      field);
}

// "integer 4", or of a list what is wrong in it: "text \"2\" as item 2".
std::string describe_misfit(const Field& field, const Json& value) {
  return std::visit(
      [&](auto* to) {
        if constexpr (requires { typename std::remove_pointer_t<decltype(to)>::value_type; }) {
          if (const Json* item = misfit(*to, value))
            return concat(describe_json(*item), " as item ", item - &value[0] + 1);
        }
        return describe_json(value);
      },
      field);
}

// The name in {"file": "mine.csv"}. For a key that allows files, it means the same as "mine.csv".
const Json& file_name(const std::string& full_name, const Key& key, const Json& value, const std::string& origin) {
  if (key.allowed.file.empty() || !value.is_object()) return value;
  const bool one_text = value.size() == 1 && value.contains("file") && value["file"].is_string();
  TWOBP_CHECK(one_text && value["file"].get_ref<const std::string&>().ends_with(key.allowed.file), origin, ": \"",
              full_name, "\" as an object must be {\"file\": \"NAME", key.allowed.file,
              "\"}, with a file name that ends in ", key.allowed.file, ".");
  return value["file"];
}

}  // namespace

// Never recurses, because the nesting of the value may be as deep as the file is long.
std::string describe_json(const Json& value) {
  constexpr size_t kLongest = 60;
  if (value.is_object()) return "a section {...}";
  if (value.is_array()) return concat("a list of ", value.size());
  if (value.is_null()) return "null";
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  if (value.is_boolean()) return "boolean " + text;
  if (value.is_string()) return "text " + text;
  return (value.is_number_integer() ? "integer " : "number ") + text;
}

Json override_value(const Key& key, const std::string& text) {
  if (key.type == "text") return text;
  if (key.type == "list of texts" && (text.empty() || text.front() != '[')) {
    Json list = Json::array();
    std::istringstream items(text);
    for (std::string item; std::getline(items, item, ',');) list.push_back(item);
    return list;
  }
  const bool numbers = key.type == "list of integers" || key.type == "list of numbers";
  const bool bare_list = numbers && (text.empty() || text.front() != '[');
  Json value = Json::parse(bare_list ? "[" + text + "]" : text, nullptr, /*allow_exceptions=*/false);
  return value.is_discarded() ? Json(text) : value;
}

void assign_value(const std::string& full_name, const Key& key, void* values, const Json& given,
                  const std::string& origin) {
  const Json& value = file_name(full_name, key, given, origin);
  const bool quantity = key.type == "text" && !key.unit.empty();  // "512MiB", or a plain number
  const Json text = quantity && value.is_number_unsigned() ? Json(value.dump()) : Json();
  const Field field = key.field(values);
  if (std::visit(Assign{text.is_null() ? value : text}, field)) return;
  fail(origin, ": \"", full_name, "\" expects ", expectation(key, field, value), ", got ",
       describe_misfit(field, value), value.is_number() && key.type == "text" ? ": write it between quotes" : "", ".");
}

void check_choice(const std::string& full_name, const Key& key, const std::string& name, bool unset_is_fine) {
  const auto& choices = key.allowed.choices;
  const bool known = std::find(choices.begin(), choices.end(), name) != choices.end();
  const bool file = !key.allowed.file.empty() && name.ends_with(key.allowed.file);
  TWOBP_CHECK(choices.empty() || unset_is_fine || known || file, full_name, " is \"", name,
              "\", which is unknown: did you mean \"", nearest(name, choices), "\"? It is ", key.allowed.text(), ".");
}

void check_value(const std::string& full_name, const Key& key, void* values, const void* defaults) {
  std::visit(
      [&](const auto* value) {
        using Value = std::remove_cv_t<std::remove_pointer_t<decltype(value)>>;
        if constexpr (std::is_same_v<Value, std::string>) {
          const Field usual = key.field(const_cast<void*>(defaults));  // only read
          check_choice(full_name, key, *value, value->empty() && std::get<std::string*>(usual)->empty());
        } else if constexpr (std::is_arithmetic_v<Value> && !std::is_same_v<Value, bool>) {
          TWOBP_CHECK(key.allowed.contains(static_cast<double>(*value)), full_name, " is ", *value, ", but must be ",
                      std::is_integral_v<Value> ? "an integer " : "a finite number ", key.allowed.text(), ".");
        }
      },
      key.field(values));
}

}  // namespace twobp
