// The table of configuration keys: each key is listed once, here, and JSON reading, --set, --print-config,
// --help and the range checks all walk it.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "twobp/config/config.h"

namespace twobp {

// Where a key's value lives in a Config; the alternative is the key's type.
using ConfigField = std::variant<bool*, int*, int64_t*, uint64_t*, double*, std::string*, std::vector<int>*,
                                 std::vector<std::string>*, std::vector<double>*>;

// Which values a key takes: one of `choices` unless there are none, a number within the bounds. An empty text
// is allowed where it is the default.
struct Allowed {
  std::vector<std::string> choices;
  std::string file;  // files whose names end so are allowed beside them, in JSON also as {"file": "name.csv"}
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  // the bound itself is out
  bool below_max = false;

  bool contains(double value) const;
  // "one of a, b", "at least 1", "from 0 to below 1", "" for anything.
  std::string text() const;
};

struct ConfigKey {
  std::string_view section;
  std::string_view name;
  ConfigField (*field)(Config& config);
  std::string_view unit;  // empty: none
  std::string_view meaning;
  Allowed allowed{};

  std::string full_name() const;  // "section.name"
  // "boolean", "integer", "number", "text", "list of integers", "list of texts",
  // "list of numbers".
  std::string_view type() const;
};

// All keys, section by section, in the order of the structs in config.h.
const std::vector<ConfigKey>& config_keys();

}  // namespace twobp
