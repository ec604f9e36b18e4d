// Keys of the configuration: their bounds, and their values from JSON or from the text of --set.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <sstream>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

struct TypeName {
  std::string_view operator()(const bool*) const { return "boolean"; }
  std::string_view operator()(const int*) const { return "integer"; }
  std::string_view operator()(const int64_t*) const { return "integer"; }
  std::string_view operator()(const uint64_t*) const { return "integer"; }
  std::string_view operator()(const double*) const { return "number"; }
  std::string_view operator()(const std::string*) const { return "text"; }
  std::string_view operator()(const std::vector<int>*) const { return "list of integers"; }
  std::string_view operator()(const std::vector<std::string>*) const { return "list of texts"; }
  std::string_view operator()(const std::vector<double>*) const { return "list of numbers"; }
  std::string_view operator()(const Choice*) const { return "text"; }
};

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

bool Allowed::contains(double value) const {
  if (!std::isfinite(value)) return false;
  return (above_min ? value > min : value >= min) && (below_max ? value < max : value <= max);
}

std::string Allowed::text() const {
  if (!choices.empty()) {
    return "one of " + join(choices) + (file.empty() ? "" : ", or a file that ends in " + file);
  }
  // Formats 16777216 as such and not as 1.67772e+07.
  const auto number = [](double value) {
    return value == std::floor(value) ? std::to_string(static_cast<long long>(value)) : concat(value);
  };
  std::string out;
  if (std::isfinite(min)) {
    out = (above_min ? "above " : std::isfinite(max) ? "from " : "at least ") + number(min);
  }
  if (std::isfinite(max)) out += (below_max ? " to below " : " to ") + number(max);
  return out;
}

std::string_view type_name(const Field& field) {
  return std::visit(TypeName{}, field);
}

Key Key::in(std::string text) && {
  unit = std::move(text);
  return std::move(*this);
}

Key Key::from(double min, double max) && {
  allowed.min = min;
  allowed.max = max;
  return std::move(*this);
}

Key Key::from_to_below(double min, double max) && {
  allowed.below_max = true;
  return std::move(*this).from(min, max);
}

Key Key::above_to(double min, double max) && {
  allowed.above_min = true;
  return std::move(*this).from(min, max);
}

Key Key::at_least(double min) && {
  allowed.min = min;
  return std::move(*this);
}

Key Key::above(double min) && {
  allowed.above_min = true;
  return std::move(*this).at_least(min);
}

Key Key::one_of(std::vector<std::string> choices) && {
  allowed.choices = std::move(choices);
  return std::move(*this);
}

Key Key::or_file(std::string ending) && {
  allowed.file = std::move(ending);
  return std::move(*this);
}

Key Key::noted_on_resume() && {
  on_resume = OnResume::kNoted;
  return std::move(*this);
}

Key Key::free_on_resume() && {
  on_resume = OnResume::kFree;
  return std::move(*this);
}

Key Key::differs_by_process() && {
  per_process = true;
  return std::move(*this);
}

Key Key::path() && {
  per_process = true;
  return std::move(*this).free_on_resume();
}

Key Key::freely_tuned() && {
  tunable = true;
  return std::move(*this);
}

int64_t parse_bytes(const std::string& text) {
  static const std::vector<std::pair<std::string, double>> units = {
      {"", 1},     {"B", 1},    {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
      {"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, status] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  size_t unit_at = static_cast<size_t>(rest - text.data());
  while (unit_at < text.size() && text[unit_at] == ' ') ++unit_at;
  const auto unit = std::find_if(units.begin(), units.end(), [&](const auto& candidate) {
    return text.compare(unit_at, std::string::npos, candidate.first) == 0;
  });
  const bool parsed = status == std::errc() && std::isfinite(number) && number >= 0 && unit != units.end();
  const double bytes = parsed ? std::floor(number * unit->second) : -1;
  // Less than a byte would round to 0, which may have the opposite meaning.
  if (!parsed || bytes >= 0x1p63 || (bytes == 0 && number > 0)) return -1;
  return static_cast<int64_t>(bytes);
}

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
