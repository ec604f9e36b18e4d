#include "twobp/plan/cost_model.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/schedule/check/in_process.h"

namespace twobp {
namespace {

void check_number(double value, const std::string& what) {
  TWOBP_CHECK(value >= 0 && value <= kMostCost, what, " is ", value, ": must be from 0 to ", kMostCost);
}

// a + (b - a) x, for every field.
LayerCost between(const LayerCost& a, const LayerCost& b, double x) {
  const auto mix = [x](double from, double to) { return from + (to - from) * x; };
  LayerCost costs;
  costs.share.forward = mix(a.share.forward, b.share.forward);
  costs.share.backward_p1 = mix(a.share.backward_p1, b.share.backward_p1);
  costs.share.backward_p2 = mix(a.share.backward_p2, b.share.backward_p2);
  costs.share.p2_units = b.share.p2_units;
  costs.share.forward_peak = mix(a.share.forward_peak, b.share.forward_peak);
  costs.share.forward_held = mix(a.share.forward_held, b.share.forward_held);
  costs.share.p1_peak = mix(a.share.p1_peak, b.share.p1_peak);
  costs.share.p1_held = mix(a.share.p1_held, b.share.p1_held);
  costs.share.stash = mix(a.share.stash, b.share.stash);
  costs.share.p2_peak = mix(a.share.p2_peak, b.share.p2_peak);
  costs.output = mix(a.output, b.output);
  costs.input_gradient = mix(a.input_gradient, b.input_gradient);
  return costs;
}

LayerCost nothing() {
  LayerCost costs;
  costs.share = {.forward = 0, .backward_p1 = 0, .backward_p2 = 0, .p2_units = 0};
  return costs;
}

LayerCost at_size(const CostModel& model, const KindCosts& kind, int size) {
  const auto& sizes = model.micro_batch_sizes;
  const auto above = std::lower_bound(sizes.begin(), sizes.end(), size);
  const size_t i = above - sizes.begin();
  if (above != sizes.end() && *above == size) return kind.at_size[i];
  if (i > 0 && above != sizes.end()) {
    const double x = static_cast<double>(size - sizes[i - 1]) / (sizes[i] - sizes[i - 1]);
    return between(kind.at_size[i - 1], kind.at_size[i], x);
  }
  const size_t nearest = i == 0 ? 0 : i - 1;
  return between(nothing(), kind.at_size[nearest], static_cast<double>(size) / sizes[nearest]);
}

void check_costs(const LayerCost& costs, const std::string& where) {
  const LayerShare& share = costs.share;
  check_number(share.forward, where + " forward seconds");
  TWOBP_CHECK(share.forward > 0, where, " forward seconds are 0: F takes time, was the layer measured?");
  check_number(share.backward_p1, where + " backward-p1 seconds");
  check_number(share.backward_p2, where + " backward-p2 seconds");
  TWOBP_CHECK(share.p2_units >= 0, where, " p2 units are ", share.p2_units, ": must not be negative");
  TWOBP_CHECK(share.p2_units > 0 || share.backward_p2 == 0, where,
              " has backward-p2 seconds, but no p2 units");
  TWOBP_CHECK(share.p2_units > 0 || share.stash == 0, where,
              " has stash bytes, but no p2 units to free them");
  check_number(share.forward_peak, where + " peak bytes during forward");
  check_number(share.p1_peak, where + " peak bytes during backward-p1");
  check_number(share.p2_peak, where + " peak bytes during backward-p2");
  check_number(share.stash, where + " stash bytes");
  check_number(costs.output, where + " output bytes");
  check_number(costs.input_gradient, where + " input gradient bytes");
  TWOBP_CHECK(std::abs(share.forward_held) <= kMostCost && std::abs(share.p1_held) <= kMostCost, where,
              " bytes held after forward or backward-p1 are beyond ", kMostCost);
}

}  // namespace

void check_cost_model(const CostModel& model) {
  TWOBP_CHECK(!model.layers.empty(), "a cost model needs layers");
  TWOBP_CHECK(!model.micro_batch_sizes.empty(), "a cost model needs at least one micro-batch size");
  for (size_t i = 0; i < model.micro_batch_sizes.size(); ++i) {
    const int size = model.micro_batch_sizes[i];
    TWOBP_CHECK(size >= 1 && (i == 0 || size > model.micro_batch_sizes[i - 1]), "micro-batch size ", size,
                ": sizes must be at least 1 and rising");
  }
  TWOBP_CHECK(model.first_trainable >= 0 && model.first_trainable <= static_cast<int>(model.layers.size()),
              "first_trainable is ", model.first_trainable, " of ", model.layers.size(), " layers");
  for (const ModelLayer& layer : model.layers) {
    TWOBP_CHECK(model.kinds.contains(layer.kind), "layer '", layer.name, "' is of kind '", layer.kind,
                "', which has no costs");
  }
  for (const auto& [name, kind] : model.kinds) {
    const std::string where = concat("kind '", name, "':");
    TWOBP_CHECK(kind.at_size.size() == model.micro_batch_sizes.size(), where, " costs at ",
                kind.at_size.size(), " micro-batch sizes of ", model.micro_batch_sizes.size());
    check_number(kind.parameters, where + " number of parameters");
    check_number(kind.parameter_bytes, where + " parameter bytes");
    check_number(kind.gradient_bytes, where + " gradient bytes");
    check_number(kind.optimizer_bytes, where + " optimizer bytes");
    check_number(kind.optimizer_seconds, where + " optimizer seconds");
    check_number(kind.update_bytes, where + " bytes of the update");
    for (size_t i = 0; i < kind.at_size.size(); ++i) {
      check_costs(kind.at_size[i], concat(where, " micro-batch size ", model.micro_batch_sizes[i], ":"));
    }
  }
  check_number(model.link_latency, "link latency");
  check_number(model.link_bytes_per_second, "link bytes per second");
}

std::vector<LayerCost> layer_costs_at(const CostModel& model, int micro_batch_size) {
  TWOBP_CHECK(micro_batch_size >= 1, "a micro-batch has at least 1 sample, not ", micro_batch_size);
  std::vector<LayerCost> costs;
  for (const ModelLayer& layer : model.layers) {
    const auto kind = model.kinds.find(layer.kind);
    TWOBP_CHECK(kind != model.kinds.end(), "the cost model has no kind '", layer.kind, "'");
    costs.push_back(at_size(model, kind->second, micro_batch_size));
    if (static_cast<int>(costs.size()) > model.first_trainable) continue;
    // Without a backward pass nothing is saved, and the output replaces the input.
    LayerCost& frozen = costs.back();
    LayerShare share{.forward = frozen.share.forward, .backward_p1 = 0, .backward_p2 = 0, .p2_units = 0};
    share.forward_peak = frozen.share.forward_peak;
    share.forward_held = frozen.output - (costs.size() > 1 ? costs[costs.size() - 2].output : 0);
    frozen = {share, frozen.output, 0};
  }
  return costs;
}

std::vector<StageCost> stage_costs(const CostModel& model, const std::vector<int>& split,
                                   int micro_batch_size) {
  check_split(split, static_cast<int>(model.layers.size()), static_cast<int>(split.size()));
  const auto layers = layer_costs_at(model, micro_batch_size);
  std::vector<StageCost> stages;
  size_t layer = 0;
  for (const int count : split) {
    std::vector<LayerShare> shares;
    for (int i = 0; i < count; ++i) shares.push_back(layers[layer + i].share);
    StageCost stage = stage_of(std::move(shares));
    stage.input_gradient_bytes = layers[layer].input_gradient;
    for (LayerShare& share : stage.layers) {
      const KindCosts& kind = model.kinds.at(model.layers[layer].kind);
      const bool trained = static_cast<int>(layer) >= model.first_trainable;
      stage.optimizer += trained ? kind.optimizer_seconds : 0;
      if (trained) stage.update_bytes = std::max(stage.update_bytes, kind.update_bytes);
      stage.gradient_bytes += trained ? kind.gradient_bytes : 0;
      stage.fixed_bytes += trained ? kind.fixed_bytes() : kind.parameter_bytes;
      share.gradient_bytes = trained ? kind.gradient_bytes : 0;
      ++layer;
    }
    stage.output_bytes = layers[layer - 1].output;
    stages.push_back(std::move(stage));
  }
  return stages;
}

SimulationOptions simulation_options(const CostModel& model) {
  SimulationOptions options = in_process_simulation();
  options.message_seconds = model.link_latency;
  options.bytes_per_second = model.link_bytes_per_second;
  return options;
}

}  // namespace twobp
