#include "twobp/plan/recompute_costs.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/recompute_mode.h"

namespace twobp {
namespace {

// `input`: bytes of the layer's input.
LayerCost recomputed(const LayerCost& was, double input, bool in_p1, bool in_p2) {
  LayerCost cost = was;
  const double saved = was.forward_held - was.output;  // by F, in addition to the input
  if (in_p1) {
    cost.backward_p1 += was.forward;
    cost.backward_p1_rise += was.forward_rise;
    cost.forward_held = was.output;
    cost.p1_peak = std::max(was.forward_peak, saved + was.p1_peak);
    cost.p1_held = saved + was.p1_held;
  }
  if (in_p2 && was.p2_units > 0) {
    cost.backward_p2 += was.forward + was.backward_p1;
    cost.backward_p2_rise += was.forward_rise + was.backward_p1_rise;
    cost.p2_units = 1;
    cost.stash = input + was.output;
    cost.p1_held += cost.stash - was.stash;
    cost.p1_peak += was.output;  // dL/dy is kept
    cost.p2_peak = std::max({was.forward_peak, saved + was.p1_peak, saved + was.p1_held + was.p2_peak});
  }
  cost.forward_peak = std::max(cost.forward_peak, cost.forward_held);
  cost.p1_peak = std::max({0.0, cost.p1_peak, cost.p1_held});
  return cost;
}

bool computes_again(const ModelLayer& layer) {
  const auto modes = recompute_names();
  return std::any_of(modes.begin(), modes.end(),
                     [&](const std::string& mode) { return layer.kind.ends_with("+" + mode); });
}

}  // namespace

bool computes_again(const CostModel& model) {
  return std::any_of(model.layers.begin(), model.layers.end(),
                     [](const ModelLayer& layer) { return computes_again(layer); });
}

CostModel with_recompute(const CostModel& model, std::string_view mode) {
  const Recompute parsed = parse_recompute(mode);
  CostModel changed = model;
  if (parsed == Recompute::kNone) return changed;
  const bool in_p1 = recomputes_activations(parsed);
  const bool in_p2 = recomputes_derivatives(parsed);
  for (size_t i = 1; i + 1 < model.layers.size(); ++i) {
    ModelLayer& layer = changed.layers[i];
    TWOBP_CHECK(!computes_again(layer), "layer '", layer.name, "' of kind '", layer.kind,
                "' was already measured with recomputation: plan with recomputation none");
    const std::string kind = concat(layer.kind, "+", mode);
    if (!changed.kinds.contains(kind)) {
      KindCosts costs = model.kinds.at(layer.kind);
      costs.in_slices.clear();  // a slice's keys and values stay, whatever is computed again: only measured
      for (size_t size = 0; size < costs.at_size.size(); ++size) {
        const double input = model.kinds.at(model.layers[i - 1].kind).at_size[size].output;
        costs.at_size[size] = recomputed(costs.at_size[size], input, in_p1, in_p2);
      }
      changed.kinds[kind] = std::move(costs);
    }
    layer.kind = kind;
  }
  return changed;
}

}  // namespace twobp
