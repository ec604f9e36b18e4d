#include "twobp/schedule/simulate/stage_model.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

namespace twobp {
namespace {

// Divides `seconds` among the layers by their weights, or equally if there are no weights.
template <typename Weight>
std::vector<double> shares(const std::vector<LayerCost>& layers, double seconds, Weight&& weight) {
  double sum = 0;
  for (const auto& layer : layers) sum += weight(layer);
  std::vector<double> shares;
  for (const auto& layer : layers) {
    shares.push_back(sum > 0 ? seconds * (weight(layer) / sum) : seconds / static_cast<double>(layers.size()));
  }
  return shares;
}

double p2_weight(const LayerCost& layer) {
  return layer.p2_units > 0 ? layer.backward_p2 : 0;
}

// Those of the others are taken to be alike. If they are applied together, they add up until the last unit.
double gradient_of(const LayerCost& layer, int unit) {
  if (layer.applies_together()) return layer.streamed_in_w() * (unit + 1) / layer.p2_units;
  if (unit == static_cast<int>(layer.streamed_unit)) return layer.streamed_in_w();
  const double others = (layer.streamable() - layer.streamed_gradient) / std::max(1, layer.p2_units - 1);
  return std::clamp(others, 0.0, layer.streamed_in_w());
}

double stash_of(const LayerCost& layer, int unit) {
  if (layer.streamed_stash == 0 || layer.p2_units == 1) return layer.stash / layer.p2_units;
  if (unit == static_cast<int>(layer.streamed_unit)) return layer.streamed_stash;
  return (layer.stash - layer.streamed_stash) / (layer.p2_units - 1);
}

void close_pieces(StageModel& model, double seconds, double freed) {
  model.pieces.push_back({seconds, freed});
  for (const P2Piece& piece : model.pieces) model.p2_peaks |= piece.peak > 0;
}

// The model of a stage with one layer: activations are added at the start of F and freed at the end of I or B.
StageModel plain_model(const StageCost& cost, double input, double output_gradient) {
  StageModel model;
  model.output = cost.output_bytes;
  model.input_gradient = cost.input_gradient_bytes;
  const double activations = cost.activation_bytes;
  model.forward.steps = {{cost.forward, activations - input, activations - input + model.output}};
  const double freed = activations + output_gradient - model.input_gradient;
  model.backward_p1.steps = {
      {.seconds = cost.backward_p1, .held = cost.stash_bytes - freed, .p2_units = cost.p2_units}};
  model.backward.steps = {{cost.backward_p1 + cost.backward_p2, 0, -freed}};
  for (int i = 0; i < cost.p2_units; ++i) {
    const double share = static_cast<double>(i) / cost.p2_units;
    model.pieces.push_back({cost.backward_p2 * share, cost.stash_bytes * share});
  }
  close_pieces(model, cost.backward_p2, cost.stash_bytes);
  return model;
}

// Puts the pieces in the order in which they run, and makes each one's numbers those before it. Returns the bytes
// that all free.
double order_pieces(std::vector<P2Piece>& pieces, const std::vector<LayerCost>& layers, bool smallest_first) {
  const auto all_of_layer = [&](const P2Piece& piece) {  // if its gradients are applied together
    const LayerCost& layer = layers[piece.layer];
    return layer.applies_together() ? layer.streamed_in_w() : piece.gradient;
  };
  if (smallest_first) std::ranges::stable_sort(pieces, {}, all_of_layer);
  std::vector<int> left;  // pieces of each layer
  double applied = 0;     // of the gradients of I, which wait for the layer's last piece
  for (const LayerCost& layer : layers) {
    left.push_back(layer.p2_units);
    if (layer.p2_units == 0) applied += layer.p1_gradient;
  }
  for (P2Piece& piece : pieces) {
    piece.gradient -= applied;
    if (--left[piece.layer] == 0) applied += layers[piece.layer].p1_gradient;
  }
  double seconds = 0;
  double freed = 0;
  for (P2Piece& piece : pieces) {  // whose own seconds and bytes become those before it
    seconds += std::exchange(piece.begin, seconds);
    freed += std::exchange(piece.freed, freed);
  }
  return freed;
}

StageModel layered_model(const StageCost& cost, bool last, bool smallest_first) {
  StageModel model;
  const auto& layers = cost.layers;
  model.output = cost.output_bytes;
  model.input_gradient = cost.input_gradient_bytes;
  const auto forward = shares(layers, cost.forward, [](const auto& layer) { return layer.forward; });
  const auto p1 = shares(layers, cost.backward_p1, [](const auto& layer) { return layer.backward_p1; });
  double p2_sum = 0;
  int units = 0;
  for (const auto& layer : layers) {
    p2_sum += p2_weight(layer);
    units += layer.p2_units;
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    model.forward.steps.push_back({.seconds = forward[i],
                                   .peak = layers[i].forward_peak,
                                   .held = layers[i].forward_held,
                                   .to_experts = layers[i].forward_to_experts,
                                   .from_experts = layers[i].forward_from_experts,
                                   .beside_experts = layers[i].beside_experts});
  }
  if (last) {  // the loss is read out and freed
    Growth& head = model.forward.steps.back();
    head.peak = std::max(head.peak, head.held);
    head.held -= model.output;
  }
  for (size_t i = layers.size(); i-- > 0;) {
    const LayerCost& layer = layers[i];
    model.backward_p1.steps.push_back({.seconds = p1[i],
                                       .peak = layer.p1_peak,
                                       .held = layer.p1_held,
                                       .p2_units = layer.p2_units,
                                       .to_experts = layer.p1_to_experts,
                                       .from_experts = layer.p1_from_experts,
                                       .beside_experts = layer.beside_experts});
    double p2 = 0;
    for (int unit = 0; unit < layer.p2_units; ++unit) {
      const double share = p2_sum > 0 ? p2_weight(layer) / p2_sum / layer.p2_units : 1.0 / units;
      p2 += cost.backward_p2 * share;
      model.pieces.push_back(
          {cost.backward_p2 * share, stash_of(layer, unit), layer.p2_peak, gradient_of(layer, unit), i});
    }
    if (layer.p2_units > 0) {
      model.backward.steps.push_back(
          {p1[i] + p2, std::max(layer.p1_peak, layer.p1_held + layer.p2_peak), layer.p1_held - layer.stash});
    } else {
      model.backward.steps.push_back({p1[i], layer.p1_peak, layer.p1_held});
    }
  }
  const double freed = order_pieces(model.pieces, layers, smallest_first);
  close_pieces(model, units > 0 ? cost.backward_p2 : 0, freed);
  return model;
}

// Without a backward, a layer's output replaces its input.
void keep_nothing(StageModel& model, double input, bool last) {
  double peak = 0;
  for (const Growth& step : model.forward.steps) peak = std::max(peak, step.peak);
  const double seconds = model.forward.whole.seconds;
  model.forward.steps = {{seconds, peak, (last ? 0 : model.output) - input}};
}

void ask_for_room(OpModel& op, double largest_p2) {
  for (Growth& step : op.steps) step.need = std::max(step.peak, step.held + largest_p2);
  op.finish();
}

}  // namespace

void OpModel::finish() {
  whole = {0, -std::numeric_limits<double>::infinity(), 0, -std::numeric_limits<double>::infinity()};
  for (const Growth& step : steps) {
    whole.seconds += step.seconds;
    whole.peak = std::max({whole.peak, whole.held + step.peak});
    if (step.need > 0) whole.need = std::max(whole.need, whole.held + step.need);
    whole.held += step.held;
    whole.peak = std::max(whole.peak, whole.held);
    exchanges |= step.exchanges();
  }
}

std::vector<StageModel> stage_models(const Schedule& schedule, const std::vector<StageCost>& costs, bool has_backward,
                                     const std::vector<bool>& smallest_first) {
  std::vector<StageModel> models;
  std::vector<double> largest_p2(schedule.ranks.size(), 0);
  for (size_t i = 0; i < costs.size(); ++i) {
    const int stage = static_cast<int>(i % schedule.stages);
    const bool first = schedule.is_first(stage);
    const bool last = schedule.is_last(stage);
    const bool sorts = !smallest_first.empty() && smallest_first[static_cast<size_t>(stage)];
    StageCost cost = costs[i];
    const double input = first ? 0 : costs[i - 1].output_bytes;
    const double output_gradient = last ? 0 : costs[i + 1].input_gradient_bytes;
    if (!schedule.gives_gradient(stage)) cost.input_gradient_bytes = 0;
    if (last && cost.layers.empty()) cost.output_bytes = 0;
    StageModel model =
        cost.layers.empty() ? plain_model(cost, input, output_gradient) : layered_model(cost, last, sorts);
    model.p2_seconds = model.pieces.back().begin;
    model.forward.finish();
    if (!has_backward || (stage < schedule.frozen && cost.layers.empty())) keep_nothing(model, input, last);
    double& largest = largest_p2[schedule.rank_of_stage[stage]];
    for (const P2Piece& piece : model.pieces) largest = std::max(largest, piece.peak);
    models.push_back(std::move(model));
  }
  for (size_t i = 0; i < models.size(); ++i) {
    StageModel& model = models[i];
    const double largest = model.largest_p2 = largest_p2[schedule.rank_of_stage[i % schedule.stages]];
    ask_for_room(model.forward, largest);
    ask_for_room(model.backward_p1, largest);
    ask_for_room(model.backward, 0);
  }
  return models;
}

}  // namespace twobp
