// What a user set: keys and values from a JSON file and from --set, put into the structs that own them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/config/section.h"

namespace twobp {

class Settings {
 public:
  Settings();
  ~Settings();
  Settings(Settings&&) noexcept;
  Settings& operator=(Settings&&) noexcept;

  // An object with an object for each section; names that begin with // are comments. `origin` names the text
  // in messages. Throws Error: not JSON (line and column), a key given twice.
  void read_json(const std::string& text, const std::string& origin);
  // "section.key=value" of --set: texts need no quotes, lists no brackets. Throws Error: not of this form.
  void set(const std::string& assignment);

  // The text that was given last for a key; none: not given.
  std::optional<std::string> text(std::string_view section, std::string_view key) const;
  bool has(std::string_view section, std::string_view key) const;
  // Puts all values into their structs, in the order given, the choices first. Throws Error: an unknown
  // section or key (naming the nearest), a key of another alternative of a choice, a wrong type.
  void assign(const std::vector<SectionValues>& sections) const;

 private:
  struct Value;
  std::vector<Value> values_;
};

// Calls visit(section's name, key, the struct that holds its value) for each key, in order; after a choice
// for the keys of what is chosen.
void for_each_key(
    const std::vector<SectionValues>& sections,
    const std::function<void(const std::string& section, const Key& key, const SectionValues& of)>& visit);

// Throws Error: a value that its key does not allow.
void check_values(const std::vector<SectionValues>& sections);
// The same for one value.
void check_value(const std::string& full_name, const Key& key, void* values, const void* defaults);

// All keys as a JSON object, a section at a time: what --print-config prints.
std::string settings_to_json(const std::vector<SectionValues>& sections);
// One value as JSON.
std::string value_to_json(const Key& key, void* values);
// A line per key: name, type, default, unit and meaning, with those of all alternatives of a choice: what
// --help shows.
std::string settings_reference(const std::vector<SectionValues>& sections);

}  // namespace twobp
