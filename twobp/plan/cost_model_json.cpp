// The cost model as a file. People read it too, so fields have names with units.
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/json_text.h"
#include "twobp/core/text.h"
#include "twobp/plan/cost_model.h"

namespace twobp {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFormat = "twobp cost model 1";
constexpr int kMostDepth = 16;  // of nested values; the format needs 8
constexpr size_t kMostBytes = size_t{16} << 20U;
constexpr size_t kMostShown = 40;  // characters of a value in messages
constexpr size_t kMostName = 200;

struct CostField {
  const char* name;
  double LayerCost::*value;
  bool may_be_negative = false;
  bool optional = false;  // 0 if it is missing
};
constexpr CostField kCostFields[] = {
    {"forward_seconds", &LayerCost::forward},
    {"backward_p1_seconds", &LayerCost::backward_p1},
    {"backward_p2_seconds", &LayerCost::backward_p2},
    {"held_bytes_after_forward", &LayerCost::forward_held, true},
    {"held_bytes_after_p1", &LayerCost::stash},  // until p2
    {"p1_change_bytes", &LayerCost::p1_held, true},
    {"forward_peak_bytes", &LayerCost::forward_peak},
    {"p1_peak_bytes", &LayerCost::p1_peak},
    {"p2_peak_bytes", &LayerCost::p2_peak},
    {"output_bytes", &LayerCost::output},
    {"input_gradient_bytes", &LayerCost::input_gradient},
    {"forward_rise_seconds", &LayerCost::forward_rise, true, true},
    {"backward_p1_rise_seconds", &LayerCost::backward_p1_rise, true, true},
    {"backward_p2_rise_seconds", &LayerCost::backward_p2_rise, true, true},
};

struct KindField {
  const char* name;
  double KindCosts::*value;
  bool optional = false;  // 0 if it is missing
};
constexpr KindField kKindFields[] = {
    {"parameters", &KindCosts::parameters},
    {"parameter_bytes", &KindCosts::parameter_bytes},
    {"gradient_bytes", &KindCosts::gradient_bytes},
    {"optimizer_bytes", &KindCosts::optimizer_bytes},
    {"optimizer_seconds", &KindCosts::optimizer_seconds},
    {"update_bytes", &KindCosts::update_bytes, true},
};

// Writes whole numbers without ".0".
ordered_json number_json(double value) {
  if (value == std::floor(value) && std::abs(value) < 9e15) return static_cast<int64_t>(value);
  return value;
}

ordered_json costs_json(const std::vector<LayerCost>& at_size, const std::vector<int>& sizes) {
  ordered_json all = ordered_json::array();
  for (size_t i = 0; i < at_size.size(); ++i) {
    const LayerCost& layer = at_size[i];
    ordered_json costs;
    costs["micro_batch_size"] = sizes.at(i);
    for (const CostField& field : kCostFields) {
      if (!field.optional || layer.*field.value != 0) costs[field.name] = number_json(layer.*field.value);
    }
    costs["p2_units"] = layer.p2_units;
    all.push_back(std::move(costs));
  }
  return all;
}

// "an array", "a string", "null".
std::string with_article(const ordered_json& value) {
  if (value.is_null()) return "null";
  return concat(value.is_structured() ? "an " : "a ", value.type_name());
}

// A short form of an invalid value, for messages.
std::string shortened(const ordered_json& value) {
  if (value.is_structured()) return with_article(value);
  std::string text = value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  if (text.size() <= kMostShown) return text;
  return text.substr(0, kMostShown) + " ...";
}

class Reader {
 public:
  explicit Reader(std::string origin) : origin_(std::move(origin)) {}

  CostModel read(const ordered_json& json) const {
    check_object(json, "the file");
    TWOBP_CHECK(json.contains("format") && json["format"] == kFormat, origin_,
                " is no cost model: its \"format\" is not \"", kFormat,
                "\". Write one with: twobp profile CONFIG --json FILE");
    check_fields(json,
                 {"format", "made_on", "micro_batch_sizes", "link", "first_trainable", "slices", "sample_costs",
                  "kinds", "layers"},
                 "the file");
    CostModel model;
    for (const auto& size : member(json, "micro_batch_sizes", "the file", ordered_json::value_t::array)) {
      model.micro_batch_sizes.push_back(whole(size, "a micro-batch size"));
    }
    for (const auto& layer : member(json, "layers", "the file", ordered_json::value_t::array)) {
      check_object(layer, "a layer");
      model.layers.push_back({text(layer, "name", "a layer"), text(layer, "kind", "a layer")});
    }
    model.first_trainable = whole(any(json, "first_trainable", "the file"), "first_trainable");
    if (json.contains("slices")) read_slices(member(json, "slices", "the file", ordered_json::value_t::array), model);
    if (json.contains("sample_costs")) {
      for (const auto& cost : member(json, "sample_costs", "the file", ordered_json::value_t::array)) {
        TWOBP_CHECK(cost.is_number() && std::isfinite(cost.get<double>()), origin_,
                    ": an entry of \"sample_costs\" must be a finite number, but it is ", shortened(cost));
        model.sample_costs.push_back(cost.get<double>());
      }
    }
    const auto& kinds = member(json, "kinds", "the file", ordered_json::value_t::object);
    for (const auto& [name, kind] : kinds.items()) {
      checked_name(name, "a kind");
      model.kinds[name] = read_kind(kind, concat("kind '", name, "'"), model);
    }
    const auto& link = member(json, "link", "the file", ordered_json::value_t::object);
    model.link_latency = real(link, "latency_seconds", "the link");
    model.link_bytes_per_second = real(link, "bytes_per_second", "the link");
    if (json.contains("made_on") && json["made_on"].is_string()) model.made_on = json["made_on"];
    try {
      check_cost_model(model);
    } catch (const Error& error) {
      fail(origin_, ": ", error.what());
    }
    return model;
  }

 private:
  void read_slices(const ordered_json& json, CostModel& model) const {
    for (const auto& lengths : json) {
      TWOBP_CHECK(lengths.is_array(), origin_, ": an entry of \"slices\" must be an array, but it is ",
                  shortened(lengths));
      auto& to = model.slice_lengths.emplace_back();
      for (const auto& length : lengths) to.push_back(whole(length, "the length of a slice"));
    }
  }

  KindCosts read_kind(const ordered_json& json, const std::string& where, const CostModel& model) const {
    check_object(json, where);
    std::set<std::string> known = {"costs", "slice_costs"};
    for (const KindField& field : kKindFields) known.insert(field.name);
    check_fields(json, known, where);
    KindCosts kind;
    for (const KindField& field : kKindFields) {
      if (field.optional && !json.contains(field.name)) continue;
      kind.*field.value = real(json, field.name, where);
    }
    const auto& costs = member(json, "costs", where, ordered_json::value_t::array);
    kind.at_size = read_costs(costs, where, model.micro_batch_sizes);
    if (!json.contains("slice_costs")) return kind;
    const auto& ways = member(json, "slice_costs", where, ordered_json::value_t::array);
    TWOBP_CHECK(ways.size() == model.slice_lengths.size(), origin_, ": ", where, " has ", ways.size(),
                " entries of \"slice_costs\", but must have one for each of the ", model.slice_lengths.size(),
                " entries of \"slices\"");
    for (size_t way = 0; way < ways.size(); ++way) {
      const size_t count = model.slice_lengths[way].size();
      TWOBP_CHECK(ways[way].is_array() && ways[way].size() == count, origin_, ": ", where,
                  ": an entry of \"slice_costs\" must be an array of ", count, " (the costs of each slice), but it is ",
                  shortened(ways[way]), " with ", ways[way].size(), " entries");
      auto& slices = kind.in_slices.emplace_back();
      for (size_t slice = 0; slice < count; ++slice) {
        const std::string one = concat(where, ", slice ", slice, " of ", count);
        TWOBP_CHECK(ways[way][slice].is_array(), origin_, ": ", one, " must be an array, but it is ",
                    shortened(ways[way][slice]));
        slices.push_back(read_costs(ways[way][slice], one, model.micro_batch_sizes));
      }
    }
    return kind;
  }

  // The costs at each of the sizes.
  std::vector<LayerCost> read_costs(const ordered_json& costs, const std::string& where,
                                    const std::vector<int>& sizes) const {
    std::vector<LayerCost> all;
    TWOBP_CHECK(costs.size() == sizes.size(), origin_, ": ", where, " has ", costs.size(),
                " entries of \"costs\", but must have one for each of the ", sizes.size(), " micro_batch_sizes");
    for (size_t i = 0; i < sizes.size(); ++i) {
      const std::string entry = concat(where, ", micro-batch size ", sizes[i]);
      check_object(costs[i], entry);
      std::set<std::string> known = {"micro_batch_size", "p2_units"};
      for (const CostField& field : kCostFields) known.insert(field.name);
      check_fields(costs[i], known, entry);
      TWOBP_CHECK(whole(any(costs[i], "micro_batch_size", entry), entry) == sizes[i], origin_, ": ", where,
                  ": \"costs\" must have the order of micro_batch_sizes, but its entry ", i, " is of another size");
      LayerCost layer;
      for (const CostField& field : kCostFields) {
        if (field.optional && !costs[i].contains(field.name)) continue;
        layer.*field.value = real(costs[i], field.name, entry, field.may_be_negative);
      }
      layer.p2_units = whole(any(costs[i], "p2_units", entry), entry + ": p2_units");
      all.push_back(layer);
    }
    return all;
  }

  // Throws for a misspelt field, which would be passed over if it is optional.
  void check_fields(const ordered_json& json, const std::set<std::string>& known, const std::string& where) const {
    for (const auto& [name, value] : json.items()) {
      TWOBP_CHECK(known.contains(name), origin_, ": ", where, " has an unknown field \"", checked_name(name, where),
                  "\": its fields are ", join({known.begin(), known.end()}));
    }
  }

  void check_object(const ordered_json& json, const std::string& where) const {
    TWOBP_CHECK(json.is_object(), origin_, ": ", where, " must be a JSON object, but it is ", with_article(json));
  }

  const ordered_json& any(const ordered_json& json, const char* key, const std::string& where) const {
    TWOBP_CHECK(json.contains(key), origin_, ": ", where, " has no \"", key, "\"");
    return json[key];
  }

  const ordered_json& member(const ordered_json& json, const char* key, const std::string& where,
                             ordered_json::value_t type) const {
    const ordered_json& value = any(json, key, where);
    TWOBP_CHECK(value.type() == type, origin_, ": ", where, ": \"", key, "\" must be ",
                with_article(ordered_json(type)), ", but it is ", with_article(value));
    return value;
  }

  std::string text(const ordered_json& json, const char* key, const std::string& where) const {
    return checked_name(member(json, key, where, ordered_json::value_t::string).get<std::string>(), where);
  }

  // Names appear in messages and tables.
  const std::string& checked_name(const std::string& name, const std::string& where) const {
    TWOBP_CHECK(name.size() <= kMostName, origin_, ": ", where, " has a name of ", name.size(), " characters: at most ",
                kMostName);
    return name;
  }

  int whole(const ordered_json& json, const std::string& what) const {
    TWOBP_CHECK(json.is_number_integer() && json >= 0 && json <= std::numeric_limits<int>::max(), origin_, ": ", what,
                " must be a whole number and not negative, but it is ", shortened(json));
    return json.get<int>();
  }

  double real(const ordered_json& json, const char* key, const std::string& where, bool may_be_negative = false) const {
    const ordered_json& value = any(json, key, where);
    TWOBP_CHECK(value.is_number() && std::isfinite(value.get<double>()), origin_, ": ", where, ": \"", key,
                "\" must be a finite number, but it is ", shortened(value));
    TWOBP_CHECK(may_be_negative || value.get<double>() >= 0, origin_, ": ", where, ": \"", key, "\" is ",
                shortened(value), ": must not be negative");
    return value.get<double>();
  }

  std::string origin_;
};

}  // namespace

std::string cost_model_to_json(const CostModel& model) {
  ordered_json json;
  json["format"] = kFormat;
  json["made_on"] = model.made_on;
  json["micro_batch_sizes"] = model.micro_batch_sizes;
  json["link"] = {{"latency_seconds", model.link_latency}, {"bytes_per_second", model.link_bytes_per_second}};
  json["first_trainable"] = model.first_trainable;
  if (!model.slice_lengths.empty()) json["slices"] = model.slice_lengths;
  if (!model.sample_costs.empty()) json["sample_costs"] = model.sample_costs;
  json["kinds"] = ordered_json::object();
  for (const auto& [name, kind] : model.kinds) {
    ordered_json entry;
    for (const KindField& field : kKindFields) entry[field.name] = number_json(kind.*field.value);
    entry["costs"] = costs_json(kind.at_size, model.micro_batch_sizes);
    for (const auto& way : kind.in_slices) {
      ordered_json slices = ordered_json::array();
      for (const auto& slice : way) slices.push_back(costs_json(slice, model.micro_batch_sizes));
      entry["slice_costs"].push_back(std::move(slices));
    }
    json["kinds"][name] = std::move(entry);
  }
  json["layers"] = ordered_json::array();
  for (const ModelLayer& layer : model.layers) {
    json["layers"].push_back({{"name", layer.name}, {"kind", layer.kind}});
  }
  return json.dump(1) + "\n";
}

CostModel parse_cost_model(const std::string& json, const std::string& origin) {
  TWOBP_CHECK(json.size() <= kMostBytes, origin, " has over ", kMostBytes >> 20U,
              " MiB: is it a cost model? Write one with: twobp profile CONFIG --json FILE");
  return Reader(origin).read(parse_json<ordered_json>(json, origin, kMostDepth));
}

CostModel read_cost_model(const std::string& path) {
  return parse_cost_model(read_text(path, kMostBytes), path);
}

}  // namespace twobp
