#include "twobp/plan/stage_bytes.h"

#include <algorithm>

namespace twobp {
namespace {

// The messages of a micro-batch that the stage receives and sends.
struct Messages {
  double input = 0;
  double output = 0;
  double output_gradient = 0;
  double input_gradient = 0;
};

StageBytes whole_stage(const StageCost& cost, const Messages& messages) {
  StageBytes bytes;
  bytes.activation = cost.activation_bytes;
  bytes.stash = cost.stash_bytes;
  bytes.forward_peak = cost.activation_bytes + messages.output;
  bytes.p1_peak =
      std::max(messages.output_gradient, cost.stash_bytes - cost.activation_bytes + messages.input_gradient);
  bytes.p2_units = cost.p2_units;
  return bytes;
}

StageBytes layered_stage(const StageCost& cost, const Messages& messages) {
  StageBytes bytes;
  bytes.p2_units = 0;
  double held = messages.input;
  bytes.forward_peak = held;
  for (const LayerShare& layer : cost.layers) {
    bytes.forward_peak = std::max(bytes.forward_peak, held + layer.forward_peak);
    held += layer.forward_held;
    bytes.forward_peak = std::max(bytes.forward_peak, held);
    bytes.stash += layer.stash;
    bytes.p2_peak = std::max(bytes.p2_peak, layer.p2_units > 0 ? layer.p2_peak : 0);
    bytes.p2_units += layer.p2_units;
  }
  held -= messages.output;
  double after = messages.output_gradient;  // bytes of I, in addition to those held before
  bytes.p1_peak = after;
  for (auto layer = cost.layers.rbegin(); layer != cost.layers.rend(); ++layer) {
    bytes.p1_peak = std::max(bytes.p1_peak, after + layer->p1_peak);
    after += layer->p1_held;
    bytes.p1_peak = std::max(bytes.p1_peak, after);
  }
  const double left = held + after - messages.input_gradient - bytes.stash;
  bytes.deficit = std::max(0.0, -held) + std::max(0.0, -left);
  bytes.activation = std::max(0.0, held);
  bytes.p2_units = std::max(1, bytes.p2_units);
  return bytes;
}

}  // namespace

std::vector<StageBytes> stage_bytes(const std::vector<StageCost>& costs) {
  std::vector<StageBytes> all;
  for (size_t s = 0; s < costs.size(); ++s) {
    const StageCost& cost = costs[s];
    const bool last = s + 1 == costs.size();
    Messages messages;
    if (s > 0) messages.input = costs[s - 1].output_bytes;
    if (s > 0) messages.input_gradient = cost.input_gradient_bytes;
    if (!last) messages.output_gradient = costs[s + 1].input_gradient_bytes;
    // The last stage's output is the loss. With layers it counts among their bytes, and is freed after F.
    if (!last || !cost.layers.empty()) messages.output = cost.output_bytes;
    all.push_back(cost.layers.empty() ? whole_stage(cost, messages) : layered_stage(cost, messages));
  }
  return all;
}

std::vector<double> least_activation_bytes(const std::vector<int>& rank_of_stage,
                                           const std::vector<StageCost>& costs) {
  const std::vector<StageBytes> bytes = stage_bytes(costs);
  std::vector<double> least;
  std::vector<double> held;
  std::vector<double> deficit;
  for (size_t s = 0; s < rank_of_stage.size(); ++s) {
    const auto rank = static_cast<size_t>(rank_of_stage[s]);
    least.resize(std::max(least.size(), rank + 1), 0);
    held.resize(least.size(), 0);
    deficit.resize(least.size(), 0);
    least[rank] = std::max(least[rank], held[rank] + bytes[s].forward_peak);
    least[rank] = std::max(least[rank], held[rank] + bytes[s].activation);
    held[rank] += bytes[s].activation;
    deficit[rank] += bytes[s].deficit;
  }
  for (size_t rank = 0; rank < least.size(); ++rank) least[rank] -= deficit[rank];
  return least;
}

}  // namespace twobp
