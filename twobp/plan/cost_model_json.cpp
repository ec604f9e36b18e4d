// The cost model as a file. People read it too, so fields have names with units.
#include <cmath>
#include <limits>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/json.h"
#include "twobp/core/text.h"
#include "twobp/plan/cost_model.h"

namespace twobp {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFormat = "twobp cost model 1";
constexpr int kMostDepth = 16;  // of nested values; the format needs 8
constexpr size_t kMostBytes = size_t{16} << 20U;

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
    {"expert_gradient_bytes", &LayerCost::expert_gradient, false, true},
    {"tied_gradient_bytes", &LayerCost::tied_gradient, false, true},
    {"p1_gradient_bytes", &LayerCost::p1_gradient, false, true},
    {"streamed_gradient_bytes", &LayerCost::streamed_gradient, false, true},
    {"streamed_gradient_unit", &LayerCost::streamed_unit, false, true},
    {"streamed_gradient_stash", &LayerCost::streamed_stash, false, true},
    {"forward_rise_seconds", &LayerCost::forward_rise, true, true},
    {"backward_p1_rise_seconds", &LayerCost::backward_p1_rise, true, true},
    {"backward_p2_rise_seconds", &LayerCost::backward_p2_rise, true, true},
    {"forward_bytes_to_experts", &LayerCost::forward_to_experts, false, true},
    {"forward_bytes_from_experts", &LayerCost::forward_from_experts, false, true},
    {"p1_bytes_to_experts", &LayerCost::p1_to_experts, false, true},
    {"p1_bytes_from_experts", &LayerCost::p1_from_experts, false, true},
    {"seconds_beside_experts", &LayerCost::beside_experts, false, true},
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
    {"sharded_bytes", &KindCosts::sharded_bytes, true},
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

int whole(const JsonNode& node) {
  return static_cast<int>(node.integer(0, std::numeric_limits<int>::max()));
}

double real(const JsonNode& node, bool may_be_negative = false) {
  const double value = node.number();
  if (value < 0 && !may_be_negative) node.refuse("is ", node.shown(), ": must not be negative");
  return value;
}

// The costs at each of the sizes.
std::vector<LayerCost> read_costs(const JsonNode& costs, const std::vector<int>& sizes) {
  std::vector<LayerCost> all;
  std::set<std::string> known = {"micro_batch_size", "p2_units"};
  for (const CostField& field : kCostFields) known.insert(field.name);
  for (const JsonNode& entry : costs.elements()) {
    entry.has_only(known);
    const int size = whole(entry["micro_batch_size"]);
    if (all.size() >= sizes.size() || size != sizes[all.size()]) break;
    LayerCost& layer = all.emplace_back();
    for (const CostField& field : kCostFields) {
      if (field.optional && !entry.has(field.name)) continue;
      layer.*field.value = real(entry[field.name], field.may_be_negative);
    }
    layer.p2_units = whole(entry["p2_units"]);
  }
  if (all.size() != sizes.size() || costs.value().size() != sizes.size())
    costs.refuse("must have an entry for each of the ", sizes.size(), " micro_batch_sizes, in their order");
  return all;
}

KindCosts read_kind(const JsonNode& node, const CostModel& model) {
  std::set<std::string> known = {"costs", "slice_costs", "tied"};
  for (const KindField& field : kKindFields) known.insert(field.name);
  node.has_only(known);
  KindCosts kind;
  for (const KindField& field : kKindFields) {
    if (field.optional && !node.has(field.name)) continue;
    kind.*field.value = real(node[field.name]);
  }
  if (const auto tied = node.find("tied")) {
    for (const auto& [name, bytes] : tied->members())
      kind.tied[name] = {real(bytes["weight_bytes"]), real(bytes["gradient_bytes"])};
  }
  kind.at_size = read_costs(node["costs"], model.micro_batch_sizes);
  const auto in_slices = node.find("slice_costs");
  if (!in_slices) return kind;
  const auto ways = in_slices->elements();
  if (ways.size() != model.slice_lengths.size())
    in_slices->refuse("has ", ways.size(), " entries, but must have one for each of the ", model.slice_lengths.size(),
                      " entries of \"slices\"");
  for (const JsonNode& way : ways) {
    const size_t count = model.slice_lengths[kind.in_slices.size()].size();
    auto& slices = kind.in_slices.emplace_back();
    for (const JsonNode& slice : way.elements()) slices.push_back(read_costs(slice, model.micro_batch_sizes));
    if (slices.size() != count)
      way.refuse("has ", slices.size(), " entries, but must have the costs of ", count, " slices");
  }
  return kind;
}

CostModel read_model(const JsonNode& file) {
  const auto format = file.find("format");
  if (!format || format->value() != kFormat)
    file.refuse("is no cost model: its \"format\" is not \"", kFormat,
                "\". Write one with: twobp profile CONFIG --json FILE");
  file.has_only({"format", "made_on", "micro_batch_sizes", "link", "first_trainable", "slices", "sample_costs", "kinds",
                 "layers"});
  CostModel model;
  for (const JsonNode& size : file["micro_batch_sizes"].elements()) model.micro_batch_sizes.push_back(whole(size));
  for (const JsonNode& layer : file["layers"].elements())
    model.layers.push_back({layer["name"].text(), layer["kind"].text()});
  model.first_trainable = whole(file["first_trainable"]);
  if (const auto slices = file.find("slices")) {
    for (const JsonNode& lengths : slices->elements()) {
      auto& to = model.slice_lengths.emplace_back();
      for (const JsonNode& length : lengths.elements()) to.push_back(whole(length));
    }
  }
  if (const auto costs = file.find("sample_costs")) {
    for (const JsonNode& cost : costs->elements()) model.sample_costs.push_back(cost.number());
  }
  for (const auto& [name, kind] : file["kinds"].members()) model.kinds[name] = read_kind(kind, model);
  const JsonNode link = file["link"];
  model.link_latency = real(link["latency_seconds"]);
  model.link_bytes_per_second = real(link["bytes_per_second"]);
  if (const auto made_on = file.find("made_on")) model.made_on = made_on->text();
  try {
    check_cost_model(model);
  } catch (const Error& error) {
    file.refuse(error.what());
  }
  return model;
}

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
    for (const auto& [name, bytes] : kind.tied) {
      entry["tied"][name] = {{"weight_bytes", number_json(bytes.weight)},
                             {"gradient_bytes", number_json(bytes.gradient)}};
    }
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
  const nlohmann::json parsed = parse_json(json, origin, kMostDepth);
  return read_model({parsed, origin});
}

CostModel read_cost_model(const std::string& path) {
  return parse_cost_model(read_text(path, kMostBytes), path);
}

}  // namespace twobp
