// The user's settings: keys and values from a JSON file and from --set. They are assigned to the structs that
// own them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "twobp/config/section.h"
#include "twobp/core/check.h"

namespace twobp {

class Settings {
 public:
  Settings();
  ~Settings();
  Settings(Settings&&) noexcept;
  Settings& operator=(Settings&&) noexcept;

  // Reads an object with an object for each section. Names that begin with // are comments. `origin` names
  // the text in messages. Throws Error if the text is not JSON (line and column), or has a key twice.
  void read_json(const std::string& text, const std::string& origin);
  // Reads "section.key=value" of --set. Texts need no quotes, and lists no brackets. Throws Error for another
  // form.
  void set(const std::string& assignment);

  // The text that was last given for a key, or none if it was not given.
  std::optional<std::string> text(std::string_view section, std::string_view key) const;
  bool has(std::string_view section, std::string_view key) const;
  // Assigns all values to their structs in the order given, choices first. Throws Error for an unknown
  // section or key (naming the nearest), a key of another alternative of a choice, or a wrong type.
  void assign(const std::vector<SectionValues>& sections) const;

 private:
  struct Value;
  std::vector<Value> values_;
};

// Calls visit(section's name, key, the struct that holds its value) for each key, in order. After a choice,
// it visits the keys of the selected struct.
void for_each_key(
    const std::vector<SectionValues>& sections,
    const std::function<void(const std::string& section, const Key& key, const SectionValues& of)>& visit);

// Throws Error if a key does not allow its value.
void check_values(const std::vector<SectionValues>& sections);
// The same for one value.
void check_value(const std::string& full_name, const Key& key, void* values, const void* defaults);

// All keys as a JSON object with an object for each section, as --print-config prints it.
std::string settings_to_json(const std::vector<SectionValues>& sections);
// One value as JSON.
std::string value_to_json(const Key& key, void* values);
// One line per key with its name, type, default, unit and meaning, including the keys of all alternatives of
// a choice, as --help shows it.
std::string settings_reference(const std::vector<SectionValues>& sections);

// Sizes in the configuration in human notation.
// "512MiB", "2GiB", "1000000" -> bytes. Returns -1 for text that is not a size, including sizes between 0 and
// 1 byte.
int64_t parse_bytes(const std::string& text);

// A key that nothing reads would change nothing, so it is an error to set it.
// Throws Error if the key's value is not its default although it is not `used`. `users`: the keys and values
// with which it is read, "optimizer.type \"sgd\"".
template <typename T>
void check_used(bool used, const char* key, const T& value, const T& unset, const char* users) {
  TWOBP_CHECK(used || value == unset, key, " is ", value, ", but only ", users, " uses it: remove it, or set it to ",
              unset, ".");
}

// Internal to this folder: one value of a key, from JSON or from the text of --set.
// Describes a JSON value in the terms of Key::type, with the value itself if it is short.
std::string describe_json(const nlohmann::ordered_json& value);

// Converts the text after '=' to a JSON value of the key's type.
nlohmann::ordered_json override_value(const Key& key, const std::string& text);

// Assigns the value to the key's member of the struct `values`. Throws Error for another type. A Choice is
// left as it is: choose() assigns it.
void assign_value(const std::string& full_name, const Key& key, void* values, const nlohmann::ordered_json& given,
                  const std::string& origin);

// Throws Error unless the key allows the text. `unset_is_fine`: whatever the text.
void check_choice(const std::string& full_name, const Key& key, const std::string& name, bool unset_is_fine);

}  // namespace twobp
