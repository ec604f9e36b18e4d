// Reading and writing the configuration: JSON text and --set overrides into a Config, a Config into JSON and
// the reference. The keys are those of config_keys.h, the checks those of config_check.cpp.
#include "twobp/config/config.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/config/config_keys.h"
#include "twobp/models/hf_config.h"

namespace twobp {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::streamsize kMaxFileBytes = 16 << 20;

bool is_comment(std::string_view name) {
  return name.substr(0, 2) == "//";
}

// What a JSON value is, in the words of ConfigKey::type, with the value itself if it is short. Never
// recurses: the value may be nested as deep as the file is long.
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

std::vector<std::string> section_names() {
  std::vector<std::string> names;
  for (const auto& key : config_keys()) {
    if (names.empty() || names.back() != key.section) names.emplace_back(key.section);
  }
  return names;
}

std::vector<std::string> key_names(std::string_view section) {
  std::vector<std::string> names;
  for (const auto& key : config_keys()) {
    if (key.section == section) names.emplace_back(key.name);
  }
  return names;
}

// The key of that bare name in whatever section, null if there is none.
const ConfigKey* find_by_name(std::string_view name) {
  const auto& keys = config_keys();
  const auto found =
      std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& key) { return key.name == name; });
  return found == keys.end() ? nullptr : &*found;
}

// Fails unless the section exists. `origin` names the file or the --set in messages.
void check_section(std::string_view section, const std::string& origin) {
  const auto sections = section_names();
  if (std::find(sections.begin(), sections.end(), section) != sections.end()) return;
  const ConfigKey* key = find_by_name(section);
  const std::string meant = key ? key->full_name() : nearest(section, sections);
  fail(origin, ": unknown section \"", section, "\": did you mean \"", meant, "\"? Sections are ",
       join(sections), ".");
}

const ConfigKey& find_key(std::string_view section, std::string_view name, const std::string& origin) {
  check_section(section, origin);
  for (const auto& key : config_keys()) {
    if (key.section == section && key.name == name) return key;
  }
  const auto names = key_names(section);
  const ConfigKey* elsewhere = find_by_name(name);
  const std::string meant = elsewhere ? elsewhere->full_name() : concat(section, ".", nearest(name, names));
  fail(origin, ": unknown key \"", section, ".", name, "\": did you mean \"", meant, "\"? Keys of \"",
       section, "\" are ", join(names), ".");
}

// Puts a JSON value into a key's field; `false` if its type or size does not fit.
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

// "an integer", "text"; for an integer that is too large also from where to where.
std::string expectation(const ConfigKey& key, const Json& value) {
  Config config;
  const std::string type(key.type());
  return std::visit(
      [&](auto* to) -> std::string {
        using Value = std::remove_pointer_t<decltype(to)>;
        if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>) {
          if (!value.is_number_integer()) return "an integer";
          return concat("an integer from ", std::numeric_limits<Value>::min(), " to ",
                        std::numeric_limits<Value>::max());
        } else {
          return type == "text" ? type : "a " + type;
        }
      },
      key.field(config));
}

// The name in {"file": "mine.csv"}, which stands for "mine.csv" where a key takes files.
const Json& file_name(const ConfigKey& key, const Json& value, const std::string& origin) {
  if (key.allowed.file.empty() || !value.is_object()) return value;
  const bool one_text = value.size() == 1 && value.contains("file") && value["file"].is_string();
  TWOBP_CHECK(one_text && value["file"].get_ref<const std::string&>().ends_with(key.allowed.file), origin,
              ": \"", key.full_name(), "\" as a section is {\"file\": \"NAME", key.allowed.file,
              "\"}, a file that ends in ", key.allowed.file, ".");
  return value["file"];
}

void assign(Config& config, const ConfigKey& key, const Json& given, const std::string& origin) {
  const Json& value = file_name(key, given, origin);
  const bool quantity = key.type() == "text" && !key.unit.empty();  // "512MiB", or a plain number
  const Json text = quantity && value.is_number_unsigned() ? Json(value.dump()) : Json();
  if (std::visit(Assign{text.is_null() ? value : text}, key.field(config))) return;
  fail(origin, ": \"", key.full_name(), "\" expects ", expectation(key, value), ", got ", describe(value),
       value.is_number() && key.type() == "text" ? ": write it between quotes" : "", ".");
}

// Refuses a key that is given twice, of which JSON would silently keep the last.
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

Json parse_json(const std::string& text, const std::string& origin) {
  TWOBP_CHECK(text.find_first_not_of(" \t\r\n") != std::string::npos, origin,
              ": empty: a configuration is a JSON object with the sections ", join(section_names()), ".");
  try {
    DuplicateCheck check{origin};
    return Json::parse(text, [&check](int depth, Json::parse_event_t event, Json& parsed) {
      return check(depth, event, parsed);
    });
  } catch (const Json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 3, column 5: ...": without the library's own tag.
    const std::string what = error.what();
    const size_t tag = what.find("] ");
    fail(origin, ": not JSON: ", tag == std::string::npos ? what : what.substr(tag + 2), ".");
  }
}

// A configuration and which of its keys were given, by their full names.
struct Given {
  Config config{};
  std::set<std::string> keys{};

  void set(const ConfigKey& key, const Json& value, const std::string& origin) {
    assign(config, key, value, origin);
    keys.insert(key.full_name());
  }
};

void read_json(Given& given, const std::string& text, const std::string& origin) {
  const Json root = parse_json(text, origin);
  TWOBP_CHECK(root.is_object(), origin, ": expected an object with the sections ", join(section_names()),
              ", got ", describe(root), ".");
  for (const auto& [section, keys] : root.items()) {
    if (is_comment(section)) continue;
    check_section(section, origin);
    TWOBP_CHECK(keys.is_object(), origin, ": \"", section, "\" expects a section {...}, got ", describe(keys),
                ".");
    for (const auto& [name, value] : keys.items()) {
      if (!is_comment(name)) given.set(find_key(section, name, origin), value, origin);
    }
  }
}

// The text after '=' as the JSON value the key's type asks for: texts need no quotes, lists no brackets.
Json override_value(const ConfigKey& key, const std::string& text) {
  if (key.type() == "text") return text;
  if (key.type() == "list of texts" && (text.empty() || text.front() != '[')) {
    Json list = Json::array();
    std::istringstream items(text);
    for (std::string item; std::getline(items, item, ',');) list.push_back(item);
    return list;
  }
  const bool numbers = key.type() == "list of integers" || key.type() == "list of numbers";
  const bool bare_list = numbers && (text.empty() || text.front() != '[');
  Json value = Json::parse(bare_list ? "[" + text + "]" : text, nullptr, /*allow_exceptions=*/false);
  return value.is_discarded() ? Json(text) : value;
}

void apply_override(Given& given, const std::string& text) {
  const std::string origin = "--set " + text;
  const size_t equals = text.find('=');
  TWOBP_CHECK(equals != std::string::npos, origin, ": expected section.key=value.");
  const std::string path = text.substr(0, equals);
  const size_t dot = path.find('.');
  if (dot == std::string::npos) check_section(path, origin);  // names the key's section if it can
  TWOBP_CHECK(dot != std::string::npos, origin, ": expected section.key=value; keys of \"", path, "\" are ",
              join(key_names(path)), ".");
  const ConfigKey& key = find_key(path.substr(0, dot), path.substr(dot + 1), origin);
  given.set(key, override_value(key, text.substr(equals + 1)), origin);
}

Config finish(Given given, const std::vector<std::string>& overrides, const std::string& origin) {
  for (const auto& text : overrides) apply_override(given, text);
  try {
    if (!given.config.model.from.empty()) fill_from_hf(given.config.model, given.keys);
    check_config(given.config);
  } catch (const Error& error) {
    if (origin.empty()) throw;
    fail(origin, ": ", error.what());
  }
  return std::move(given.config);
}

std::string read_file(const std::string& path) {
  std::error_code status;
  TWOBP_CHECK(!std::filesystem::is_directory(path, status), path,
              ": is a folder: give the configuration file itself.");
  std::ifstream file(path, std::ios::binary);
  TWOBP_CHECK(file, path, ": cannot read the configuration: no such file, or no permission.");
  std::string text;
  std::vector<char> buffer(1 << 16);
  while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) || file.gcount() > 0) {
    text.append(buffer.data(), static_cast<size_t>(file.gcount()));
    TWOBP_CHECK(static_cast<std::streamsize>(text.size()) <= kMaxFileBytes, path,
                ": larger than 16 MiB: not a configuration.");
  }
  TWOBP_CHECK(!file.bad(), path, ": cannot read the configuration: input error.");
  return text;
}

Json value_json(const ConfigKey& key, Config& config) {
  return std::visit([](const auto* value) { return Json(*value); }, key.field(config));
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

}  // namespace

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  if (!path.empty()) return parse_config(read_file(path), path, overrides);
  return finish({}, overrides, "");
}

Config parse_config(const std::string& json, const std::string& origin,
                    const std::vector<std::string>& overrides) {
  Given given;
  read_json(given, json, origin);
  return finish(std::move(given), overrides, origin);
}

std::string config_to_json(const Config& config) {
  Config copy = config;  // the table hands out pointers to change through
  Json root = Json::object();
  for (const auto& key : config_keys()) {
    root[std::string(key.section)][std::string(key.name)] = value_json(key, copy);
  }
  // A path given by --set need not be UTF-8.
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string config_reference() {
  Config defaults;
  std::vector<std::vector<std::string>> rows;
  for (const auto& key : config_keys()) {
    const std::string allowed = key.allowed.text();
    rows.push_back({key.full_name(), std::string(key.type()), value_json(key, defaults).dump(),
                    key.unit.empty() ? "-" : std::string(key.unit),
                    concat(key.meaning, allowed.empty() ? "" : " (" + allowed + ")")});
  }
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i) out += padded(row[i], widths[i]) + "  ";
    out += row.back() + "\n";
  }
  return out;
}

}  // namespace twobp
