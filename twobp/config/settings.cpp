#include "twobp/config/settings.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
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
    return Json::parse(
        text, [&check](int depth, Json::parse_event_t event, Json& parsed) { return check(depth, event, parsed); });
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

bool is_former(const std::string& section, const std::string& key, const Json& value, const std::string& origin) {
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
    fail(origin, ": unknown key \"", section, ".", name, "\": did you mean \"", meant, "\"? Keys of \"", section,
         "\" are ", join(names), ".");
  }

  void check_section(const std::string& section, const std::string& origin) const {
    if (places_.contains(section)) return;
    const std::string elsewhere = section_of(section);
    const std::string meant = elsewhere.empty() ? nearest(section, names_) : concat(elsewhere, ".", section);
    fail(origin, ": unknown section \"", section, "\": did you mean \"", meant, "\"? Sections are ", join(names_), ".");
  }

  std::vector<std::string> key_names(const std::string& section) const {
    std::vector<std::string> names;
    for (const auto& [name, place] : places_.at(section)) names.push_back(name);
    return names;
  }

 private:
  // Throws Error for a key of an alternative that is not selected.
  void check_alternatives(const std::string& section, const std::string& name, const std::string& origin) const {
    const auto choice = choices_.find(section);
    if (choice == choices_.end()) return;
    std::vector<std::string> owners;
    for (const Section* other : choice->second->alternatives()) {
      const auto& keys = other->keys;
      if (std::any_of(keys.begin(), keys.end(), [&](const Key& key) { return key.name == name; }))
        owners.push_back(other->name);
    }
    TWOBP_CHECK(owners.empty(), origin, ": \"", section, ".", name, "\" is a key of ", section, ".type ", join(owners),
                ", but ", section, ".type is ", choice->second->name(), ": remove it, or set ", section, ".type.");
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

// Selects the alternative of a choice before the section's other keys are looked up.
void choose(const std::string& full_name, const Key& key, Choice& choice, const Json& value,
            const std::string& origin) {
  TWOBP_CHECK(value.is_string(), origin, ": \"", full_name, "\" expects text, got ", describe_json(value), ".");
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
              describe_json(root), ".");
  for (const auto& [section, keys] : root.items()) {
    if (is_comment(section)) continue;
    if (!keys.is_object()) {
      values_.push_back({section, "", within(keys), false, origin});  // assign() checks that the section exists
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
  const auto found = std::find_if(values_.rbegin(), values_.rend(),
                                  [&](const Value& value) { return value.section == section && value.key == key; });
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
      TWOBP_CHECK(!given.is_assignment, given.origin, ": expected section.key=value; keys of \"", given.section,
                  "\" are ", join(directory.key_names(given.section)), ".");
      TWOBP_CHECK(given.value->is_object(), given.origin, ": \"", given.section, "\" expects a section {...}, got ",
                  describe_json(*given.value), ".");
      continue;
    }
    if (is_former(given.section, given.key, *given.value, given.origin)) continue;
    const Place place = directory.find(given.section, given.key, given.origin);
    const std::string full_name = given.section + "." + given.key;
    if (given.is_assignment) {
      assign_value(full_name, *place.key, place.values, override_value(*place.key, given.value->get<std::string>()),
                   given.origin);
    } else {
      assign_value(full_name, *place.key, place.values, *given.value, given.origin);
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

void check_values(const std::vector<SectionValues>& sections) {
  for_each_key(sections, [](const std::string& section, const Key& key, const SectionValues& of) {
    check_value(section + "." + key.name, key, of.values, of.section->defaults.get());
  });
}

}  // namespace twobp
