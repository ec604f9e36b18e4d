// Settings as text: JSON for --print-config, a table for --help.
#include <algorithm>
#include <map>
#include <type_traits>
#include <variant>

#include <nlohmann/json.hpp>

#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const Key& key, void* values) {
  return std::visit(
      [](const auto* value) {
        using Value = std::remove_cv_t<std::remove_pointer_t<decltype(value)>>;
        if constexpr (std::is_same_v<Value, Choice>) {
          return Json(value->name());
        } else {
          return Json(*value);
        }
      },
      key.field(values));
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

// "decoders, bert": the names, with a group in place of its members if most of them are there.
std::string alternatives_text(std::vector<std::string> names, const std::vector<const Section*>& all) {
  std::map<std::string, std::vector<std::string>> groups;
  for (const Section* one : all)
    if (!one->group.empty()) groups[one->group].push_back(one->name);
  for (const auto& [group, members] : groups) {
    std::vector<std::string> missing;
    for (const std::string& member : members)
      if (std::find(names.begin(), names.end(), member) == names.end()) missing.push_back(member);
    if (2 * missing.size() >= members.size()) continue;
    std::erase_if(names, [&, &members = members](const std::string& name) {
      return std::find(members.begin(), members.end(), name) != members.end();
    });
    names.insert(names.begin(), missing.empty() ? group : concat(group, " except ", join(missing, " and ")));
  }
  return join(names);
}

}  // namespace

std::string settings_to_json(const std::vector<SectionValues>& sections) {
  Json root = Json::object();
  for_each_key(sections, [&root](const std::string& section, const Key& key, const SectionValues& of) {
    root[section][key.name] = json_of(key, of.values);
  });
  // A path from --set need not be UTF-8.
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string value_to_json(const Key& key, void* values) {
  return json_of(key, values).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string settings_reference(const std::vector<SectionValues>& sections) {
  struct Row {
    std::vector<std::string> cells;  // name, type, default, unit
    std::string meaning;
    std::vector<std::string> alternatives;  // of a choice: those that have this key
  };
  std::vector<Row> rows;
  std::vector<const Section*> all;  // alternatives
  const auto add = [&rows](const std::string& section, const Key& key, void* values, const std::string* of) {
    const std::string allowed = key.allowed.text();
    Row row{{section + "." + key.name, std::string(key.type), value_to_json(key, values),
             key.unit.empty() ? "-" : key.unit},
            concat(key.meaning, allowed.empty() ? "" : " (" + allowed + ")"),
            {}};
    if (of != nullptr) {
      const auto same = std::find_if(rows.begin(), rows.end(), [&](const Row& known) {
        return !known.alternatives.empty() && known.cells == row.cells && known.meaning == row.meaning;
      });
      if (same != rows.end()) {
        same->alternatives.push_back(*of);
        return;
      }
      row.alternatives.push_back(*of);
    }
    rows.push_back(std::move(row));
  };
  for (const SectionValues& section : sections) {
    for (const Key& key : section.section->keys) {
      void* const defaults = section.section->defaults.get();
      add(section.section->name, key, defaults, nullptr);
      const Field field = key.field(section.values);
      if (!std::holds_alternative<Choice*>(field)) continue;
      for (const Section* other : std::get<Choice*>(field)->alternatives()) {
        all.push_back(other);
        for (const Key& further : other->keys) add(section.section->name, further, other->defaults.get(), &other->name);
      }
    }
  }
  std::vector<size_t> widths(rows.front().cells.size(), 0);
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.cells.size(); ++i) widths[i] = std::max(widths[i], row.cells[i].size());
  }
  std::string out;
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.cells.size(); ++i) out += padded(row.cells[i], widths[i]) + "  ";
    out += concat(row.alternatives.empty() ? "" : alternatives_text(row.alternatives, all) + ": ", row.meaning, "\n");
  }
  return out;
}

}  // namespace twobp
