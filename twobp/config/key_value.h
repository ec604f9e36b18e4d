// Internal to this folder: one value of a key, from JSON or from the text of --set.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "twobp/config/section.h"

namespace twobp {

// Describes a JSON value in the terms of Key::type, with the value itself if it is short.
std::string describe_json(const nlohmann::ordered_json& value);

// Converts the text after '=' to a JSON value of the key's type.
nlohmann::ordered_json override_value(const Key& key, const std::string& text);

// Assigns the value to the key's member of the struct `values`. Throws Error for another type. A Choice is left as it
// is: choose() assigns it.
void assign_value(const std::string& full_name, const Key& key, void* values, const nlohmann::ordered_json& given,
                  const std::string& origin);

// Throws Error unless the key allows the text. `unset_is_fine`: whatever the text.
void check_choice(const std::string& full_name, const Key& key, const std::string& name, bool unset_is_fine);

}  // namespace twobp
