#include "twobp/config/settings.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

using Json = nlohmann::ordered_json;

bool is_comment(std::string_view name) {
  return name.substr(0, 2) == "//";
}

// Describes a JSON value in the terms of Key::type, with the value itself if it is short. Never recurses,
// because the nesting of the value may be as deep as the file is long.
std::string describe(const Json& value) {
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
          return item != nullptr && item->is_number_integer() ? "integers" + range_of<int>()
                                                              : "a list of integers";
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
            return concat(describe(*item), " as item ", item - &value[0] + 1);
        }
        return describe(value);
      },
      field);
}

// Refuses a duplicate key. JSON would silently keep the last one.
struct DuplicateCheck {
  const std::string& origin;
  std::vector<std::set<std::string>> open{};

  bool operator()(int /*depth*/, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto& name = parsed.get_ref<const std::string&>();
      TWOBP_CHECK(is_comment(name) || open.back().insert(name).second, origin, ": the key \"", name,
                  "\" is given twice: remove one.");
    }
    return true;
  }
};

Json parse_settings(const std::string& text, const std::string& origin) {
  TWOBP_CHECK(text.find_first_not_of(" \t\r\n") != std::string::npos, origin,
              ": empty: a configuration is a JSON object with an object for each section.");
  try {
    DuplicateCheck check{origin};
    return Json::parse(text, [&check](int depth, Json::parse_event_t event, Json& parsed) {
      return check(depth, event, parsed);
    });
  } catch (const Json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 3, column 5: ...": removes the library's tag.
    const std::string what = error.what();
    const size_t tag = what.find("] ");
    fail(origin, ": not JSON: ", tag == std::string::npos ? what : what.substr(tag + 2), ".");
  }
}

// A key of the configuration and the struct that holds its value.
struct Place {
  const Key* key = nullptr;
  void* values = nullptr;
};

// A key of an earlier version, which files and checkpoints may still have. An empty list says nothing.
struct FormerKey {
  std::string_view section, key, now;
};
constexpr FormerKey kFormerKeys[] = {
    {"optimizer", "weight_decay_of",
     "write each PATTERN=DECAY as \"PATTERN weight_decay=DECAY\" in \"optimizer.groups\""}};

bool is_former(const std::string& section, const std::string& key, const Json& value,
               const std::string& origin) {
  for (const FormerKey& former : kFormerKeys) {
    if (section != former.section || key != former.key) continue;
    TWOBP_CHECK(value.empty() || value == "[]", origin, ": \"", section, ".", key,
                "\" is no longer a key: ", former.now, ".");
    return true;
  }
  return false;
}

// The sections by name, as in the user's files.
class Directory {
 public:
  explicit Directory(const std::vector<SectionValues>& sections) {
    for_each_key(sections, [this](const std::string& section, const Key& key, const SectionValues& of) {
      if (names_.empty() || names_.back() != section) names_.push_back(section);
      const Field field = key.field(of.values);
      if (std::holds_alternative<Choice*>(field)) choices_[section] = std::get<Choice*>(field);
      places_[section].emplace_back(key.name, Place{&key, of.values});
    });
  }

  Place find(const std::string& section, const std::string& name, const std::string& origin) const {
    check_section(section, origin);
    for (const auto& [known, place] : places_.at(section)) {
      if (known == name) return place;
    }
    check_alternatives(section, name, origin);
    const auto names = key_names(section);
    const std::string elsewhere = section_of(name);
    const std::string meant =
        concat(elsewhere.empty() ? section : elsewhere, ".", elsewhere.empty() ? nearest(name, names) : name);
    fail(origin, ": unknown key \"", section, ".", name, "\": did you mean \"", meant, "\"? Keys of \"",
         section, "\" are ", join(names), ".");
  }

  void check_section(const std::string& section, const std::string& origin) const {
    if (places_.contains(section)) return;
    const std::string elsewhere = section_of(section);
    const std::string meant = elsewhere.empty() ? nearest(section, names_) : concat(elsewhere, ".", section);
    fail(origin, ": unknown section \"", section, "\": did you mean \"", meant, "\"? Sections are ",
         join(names_), ".");
  }

  std::vector<std::string> key_names(const std::string& section) const {
    std::vector<std::string> names;
    for (const auto& [name, place] : places_.at(section)) names.push_back(name);
    return names;
  }

 private:
  // Throws Error for a key of an alternative that is not selected.
  void check_alternatives(const std::string& section, const std::string& name,
                          const std::string& origin) const {
    const auto choice = choices_.find(section);
    if (choice == choices_.end()) return;
    std::vector<std::string> owners;
    for (const Section* other : choice->second->alternatives()) {
      const auto& keys = other->keys;
      if (std::any_of(keys.begin(), keys.end(), [&](const Key& key) { return key.name == name; }))
        owners.push_back(other->name);
    }
    TWOBP_CHECK(owners.empty(), origin, ": \"", section, ".", name, "\" is a key of ", section, ".type ",
                join(owners), ", but ", section, ".type is ", choice->second->name(), ": remove it, or set ",
                section, ".type.");
  }

  // The first section that has a key of this name, or "" if none does.
  std::string section_of(std::string_view name) const {
    for (const std::string& section : names_) {
      for (const auto& [known, place] : places_.at(section)) {
        if (known == name) return section;
      }
    }
    return "";
  }

  std::vector<std::string> names_;  // of sections
  std::map<std::string, std::vector<std::pair<std::string, Place>>> places_;
  std::map<std::string, Choice*> choices_;
};

// The name in {"file": "mine.csv"}. For a key that allows files, it means the same as "mine.csv".
const Json& file_name(const std::string& full_name, const Key& key, const Json& value,
                      const std::string& origin) {
  if (key.allowed.file.empty() || !value.is_object()) return value;
  const bool one_text = value.size() == 1 && value.contains("file") && value["file"].is_string();
  TWOBP_CHECK(one_text && value["file"].get_ref<const std::string&>().ends_with(key.allowed.file), origin,
              ": \"", full_name, "\" as an object must be {\"file\": \"NAME", key.allowed.file,
              "\"}, with a file name that ends in ", key.allowed.file, ".");
  return value["file"];
}

// Converts the text after '=' to a JSON value of the key's type.
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

void assign_value(const std::string& full_name, const Place& place, const Json& given,
                  const std::string& origin) {
  const Key& key = *place.key;
  const Json& value = file_name(full_name, key, given, origin);
  const bool quantity = key.type == "text" && !key.unit.empty();  // "512MiB", or a plain number
  const Json text = quantity && value.is_number_unsigned() ? Json(value.dump()) : Json();
  const Field field = key.field(place.values);
  if (std::visit(Assign{text.is_null() ? value : text}, field)) return;
  fail(origin, ": \"", full_name, "\" expects ", expectation(key, field, value), ", got ",
       describe_misfit(field, value),
       value.is_number() && key.type == "text" ? ": write it between quotes" : "", ".");
}

void check_choice(const std::string& full_name, const Key& key, const std::string& name, bool unset_is_fine) {
  const auto& choices = key.allowed.choices;
  const bool known = std::find(choices.begin(), choices.end(), name) != choices.end();
  const bool file = !key.allowed.file.empty() && name.ends_with(key.allowed.file);
  TWOBP_CHECK(choices.empty() || unset_is_fine || known || file, full_name, " is \"", name,
              "\", which is unknown: did you mean \"", nearest(name, choices), "\"? It is ",
              key.allowed.text(), ".");
}

// Selects the alternative of a choice before the section's other keys are looked up.
void choose(const std::string& full_name, const Key& key, Choice& choice, const Json& value,
            const std::string& origin) {
  TWOBP_CHECK(value.is_string(), origin, ": \"", full_name, "\" expects text, got ", describe(value), ".");
  const auto& name = value.get_ref<const std::string&>();
  check_choice(concat(origin, ": ", full_name), key, name, false);
  if (name != choice.name()) choice.choose(name);
}

}  // namespace

struct Settings::Value {
  std::string section;
  std::string key;
  // Within its file and never copied, because its nesting may be as deep as the file is long.
  std::shared_ptr<const Json> value;
  bool is_assignment = false;  // from --set: a text that the key's type must interpret
  std::string origin;
};

Settings::Settings() = default;
Settings::~Settings() = default;
Settings::Settings(Settings&&) noexcept = default;
Settings& Settings::operator=(Settings&&) noexcept = default;

void Settings::read_json(const std::string& text, const std::string& origin) {
  const auto file = std::make_shared<const Json>(parse_settings(text, origin));
  const Json& root = *file;
  const auto within = [&file](const Json& value) { return std::shared_ptr<const Json>(file, &value); };
  TWOBP_CHECK(root.is_object(), origin, ": expected an object with an object for each section, got ",
              describe(root), ".");
  for (const auto& [section, keys] : root.items()) {
    if (is_comment(section)) continue;
    if (!keys.is_object()) {
      values_.push_back(
          {section, "", within(keys), false, origin});  // assign() checks that the section exists
      continue;
    }
    if (keys.empty()) values_.push_back({section, "", within(keys), false, origin});
    for (const auto& [name, value] : keys.items()) {
      if (!is_comment(name)) values_.push_back({section, name, within(value), false, origin});
    }
  }
}

void Settings::set(const std::string& assignment) {
  const std::string origin = "--set " + assignment;
  const size_t equals = assignment.find('=');
  TWOBP_CHECK(equals != std::string::npos, origin, ": expected section.key=value.");
  const std::string path = assignment.substr(0, equals);
  const size_t dot = path.find('.');
  const bool whole = dot == std::string::npos;
  values_.push_back({whole ? path : path.substr(0, dot), whole ? "" : path.substr(dot + 1),
                     std::make_shared<const Json>(assignment.substr(equals + 1)), true, origin});
}

std::optional<std::string> Settings::text(std::string_view section, std::string_view key) const {
  const auto found = std::find_if(values_.rbegin(), values_.rend(), [&](const Value& value) {
    return value.section == section && value.key == key;
  });
  if (found == values_.rend() || !found->value->is_string()) return std::nullopt;
  return found->value->get<std::string>();
}

bool Settings::has(std::string_view section, std::string_view key) const {
  return std::any_of(values_.begin(), values_.end(),
                     [&](const Value& value) { return value.section == section && value.key == key; });
}

void Settings::assign(const std::vector<SectionValues>& sections) const {
  for_each_key(sections, [this](const std::string& section, const Key& key, const SectionValues& of) {
    const Field field = key.field(of.values);
    if (!std::holds_alternative<Choice*>(field)) return;
    const auto last = std::find_if(values_.rbegin(), values_.rend(), [&](const Value& value) {
      return value.section == section && value.key == key.name;
    });
    if (last != values_.rend())
      choose(section + "." + key.name, key, *std::get<Choice*>(field), *last->value, last->origin);
  });
  const Directory directory(sections);
  for (const Value& given : values_) {
    if (given.key.empty()) {
      directory.check_section(given.section, given.origin);
      TWOBP_CHECK(!given.is_assignment, given.origin, ": expected section.key=value; keys of \"",
                  given.section, "\" are ", join(directory.key_names(given.section)), ".");
      TWOBP_CHECK(given.value->is_object(), given.origin, ": \"", given.section,
                  "\" expects a section {...}, got ", describe(*given.value), ".");
      continue;
    }
    if (is_former(given.section, given.key, *given.value, given.origin)) continue;
    const Place place = directory.find(given.section, given.key, given.origin);
    const std::string full_name = given.section + "." + given.key;
    if (given.is_assignment) {
      assign_value(full_name, place, override_value(*place.key, given.value->get<std::string>()),
                   given.origin);
    } else {
      assign_value(full_name, place, *given.value, given.origin);
    }
  }
}

void for_each_key(
    const std::vector<SectionValues>& sections,
    const std::function<void(const std::string& section, const Key& key, const SectionValues& of)>& visit) {
  for (const SectionValues& of : sections) {
    for (const Key& key : of.section->keys) {
      visit(of.section->name, key, of);
      const Field field = key.field(of.values);
      if (!std::holds_alternative<Choice*>(field)) continue;
      const SectionValues chosen = std::get<Choice*>(field)->chosen();
      for (const Key& further : chosen.section->keys) visit(of.section->name, further, chosen);
    }
  }
}

void check_value(const std::string& full_name, const Key& key, void* values, const void* defaults) {
  std::visit(
      [&](const auto* value) {
        using Value = std::remove_cv_t<std::remove_pointer_t<decltype(value)>>;
        if constexpr (std::is_same_v<Value, std::string>) {
          const Field usual = key.field(const_cast<void*>(defaults));  // only read
          check_choice(full_name, key, *value, value->empty() && std::get<std::string*>(usual)->empty());
        } else if constexpr (std::is_arithmetic_v<Value> && !std::is_same_v<Value, bool>) {
          TWOBP_CHECK(key.allowed.contains(static_cast<double>(*value)), full_name, " is ", *value,
                      ", but must be ", std::is_integral_v<Value> ? "an integer " : "a finite number ",
                      key.allowed.text(), ".");
        }
      },
      key.field(values));
}

void check_values(const std::vector<SectionValues>& sections) {
  for_each_key(sections, [](const std::string& section, const Key& key, const SectionValues& of) {
    check_value(section + "." + key.name, key, of.values, of.section->defaults.get());
  });
}

}  // namespace twobp
