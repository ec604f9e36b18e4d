#include "twobp/plan/memory/stage_bytes.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/schedule/simulate/stage_cost.h"

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
  for (const LayerCost& layer : cost.layers) {
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
  bytes.for_others = held + after - messages.input_gradient - bytes.stash;
  bytes.deficit = std::max(0.0, -held);
  bytes.activation = std::max(0.0, held);
  bytes.p2_units = std::max(1, bytes.p2_units);
  return bytes;
}

// What the slices of a micro-batch leave after I, in the order of I, last to first. Only what is missing at some time
// is a deficit; the first slice's I, which comes last, is taken to even out the rest. `at`: the place of the first
// slice.
void settle_slices(std::vector<StageBytes>& all, size_t at, size_t stages, size_t slices) {
  double sum = 0;
  double least = 0;
  for (size_t slice = slices; slice-- > 0;) {
    sum += all[at + slice * stages].for_others;
    least = std::min(least, sum);
  }
  StageBytes& first = all[at];
  first.for_others -= sum;
  first.deficit -= least;
}

}  // namespace

std::vector<StageBytes> stage_bytes(const std::vector<StageCost>& costs, int stages, int slices) {
  std::vector<StageBytes> all;
  for (size_t s = 0; s < costs.size(); ++s) {
    const StageCost& cost = costs[s];
    const bool first = s % stages == 0;
    const bool last = (s + 1) % stages == 0;
    Messages messages;
    if (!first) messages.input = costs[s - 1].output_bytes;
    if (!first) messages.input_gradient = cost.input_gradient_bytes;
    if (!last) messages.output_gradient = costs[s + 1].input_gradient_bytes;
    // The last stage's output is the loss. With layers it counts among their bytes, and is freed after F.
    if (!last || !cost.layers.empty()) messages.output = cost.output_bytes;
    all.push_back(cost.layers.empty() ? whole_stage(cost, messages) : layered_stage(cost, messages));
  }
  const size_t rows = all.size() / stages;
  const size_t together = std::min<size_t>(rows, slices);
  for (size_t row = 0; row < rows; row += together) {
    for (int stage = 0; stage < stages; ++stage) settle_slices(all, row * stages + stage, stages, together);
  }
  return all;
}

std::vector<double> least_activation_bytes(const std::vector<int>& rank_of_stage, const std::vector<StageCost>& costs,
                                           int slices) {
  const size_t stages = rank_of_stage.size();
  const std::vector<StageBytes> bytes = stage_bytes(costs, static_cast<int>(stages), slices);
  std::vector<double> least;
  std::vector<double> held;  // by rank and slice: of this slice and the previous ones
  std::vector<double> deficit;
  for (size_t s = 0; s < stages; ++s) {
    const auto rank = static_cast<size_t>(rank_of_stage[s]);
    least.resize(std::max(least.size(), rank + 1), 0);
    held.resize(least.size() * slices, 0);
    deficit.resize(least.size(), 0);
    // While F of a slice runs, its stage and the rank's earlier ones hold that slice and the previous ones.
    for (int slice = 0; slice < slices; ++slice) {
      const StageBytes& of = bytes[costs.size() == stages ? s : slice * stages + s];
      const double before = held[rank * slices + slice];
      least[rank] = std::max({least[rank], before + of.forward_peak, before + of.activation});
      for (int later = slice; later < slices; ++later) held[rank * slices + later] += of.activation;
      deficit[rank] += of.deficit;
    }
  }
  // The first I of a rank: of its last stage, and of the last slice, which makes gradients for the others.
  for (size_t s = 0; s < stages; ++s) {
    const auto rank = static_cast<size_t>(rank_of_stage[s]);
    if (std::find(rank_of_stage.begin() + s + 1, rank_of_stage.end(), rank_of_stage[s]) != rank_of_stage.end())
      continue;
    const StageBytes& last = bytes[bytes.size() - stages + s];
    least[rank] = std::max(least[rank], held[rank * slices + slices - 1] - last.activation + last.for_others);
  }
  for (size_t rank = 0; rank < least.size(); ++rank) least[rank] -= deficit[rank];
  return least;
}

std::vector<double> caps_for(double memory, const std::vector<int>& rank_of_stage, int ranks,
                             const std::vector<StageCost>& costs) {
  if (memory <= 0) return {};
  std::vector<double> caps(ranks, memory);
  for (size_t s = 0; s < rank_of_stage.size(); ++s) caps[rank_of_stage[s]] -= costs[s].fixed_bytes;
  for (double& cap : caps) cap = std::max(cap, 1.0);  // 0 would mean no cap
  return caps;
}

std::vector<StageCost> without_gradients(std::vector<StageCost> costs) {
  for (StageCost& cost : costs) cost.fixed_bytes = cost.fixed(/*streams=*/true);
  return costs;
}

double peak_of(const Simulation& simulation) {
  double peak = 0;
  for (const auto& rank : simulation.ranks) peak = std::max(peak, rank.total_peak_bytes());
  return peak;
}

bool fits(const Simulation& simulation, double memory) {
  return fits(peak_of(simulation), memory);
}

bool fits(double bytes, double memory) {
  return memory <= 0 || bytes <= memory * (1 + 1e-9);
}

std::vector<int64_t> standard_peaks(const Schedule& schedule, const std::vector<StageCost>& costs) {
  TWOBP_CHECK(!schedule.has(Op::kBackwardP2), "standard_peaks takes a schedule with p2 off, but '", schedule.name,
              "' has W");
  SimulationOptions options;
  options.timeline = options.check = false;
  std::vector<int64_t> peaks;
  for (const RankSimulation& rank : simulate(schedule, costs, options).ranks)
    peaks.push_back(static_cast<int64_t>(rank.peak_bytes));
  return peaks;
}

std::vector<int64_t> auto_caps(const std::vector<int64_t>& standard_peaks, const std::vector<int64_t>& fixed,
                               double times) {
  int64_t fullest = 0;
  for (size_t r = 0; r < fixed.size(); ++r) fullest = std::max(fullest, fixed[r] + standard_peaks[r]);
  const auto allowed = static_cast<int64_t>(std::floor(static_cast<double>(fullest) * times));
  std::vector<int64_t> caps;
  // At least 1, because 0 means no cap.
  for (const int64_t bytes : fixed) caps.push_back(std::max<int64_t>(1, allowed - bytes));
  return caps;
}

}  // namespace twobp
