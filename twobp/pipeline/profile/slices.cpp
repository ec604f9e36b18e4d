#include "twobp/pipeline/profile/slices.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/transport/collectives.h"

namespace twobp {
namespace {

// Cuts at these positions, moved to multiples of a block, at least one block apart.
Cuts on_blocks(const std::vector<double>& wanted, int64_t positions, int64_t length = kSliceBlock) {
  const auto slices = static_cast<int64_t>(wanted.size()) - 1;
  const int64_t blocks = positions / length;
  TWOBP_CHECK(blocks >= slices, "pipeline.slices is ", slices, ", but a sequence of ", positions, " positions has ",
              blocks, blocks == 1 ? " block of " : " blocks of ", length, ": ",
              blocks < 2 ? "set it to 1" : concat("use at most ", blocks, " slices"), ", or give longer sequences");
  Cuts cuts = {0};
  for (int64_t s = 1; s < slices; ++s) {
    const auto block = static_cast<int64_t>(std::lround(wanted[s] / static_cast<double>(length)));
    cuts.push_back(length * std::clamp(block, cuts.back() / length + 1, blocks - (slices - s)));
  }
  cuts.push_back(positions);
  return cuts;
}

// Slices of unequal length must bring this much. What lines do not show costs more than smaller gains: the speed of
// products depends on the number of rows, by up to 4 %. Slices of equal length also keep their cuts, and so the bits of
// a run, whatever a profile measures.
constexpr double kFaster = 0.98;

// What positions cost: a + b x at position x, so a slice [p, q) costs a (q - p) + b (q^2 - p^2) / 2.
struct Line {
  double a = 0;
  double b = 0;  // at least 0

  double seconds(int64_t begin, int64_t end) const {
    const auto p = static_cast<double>(begin), q = static_cast<double>(end);
    return a * (q - p) + b * (q * q - p * p) / 2;
  }
  // The end of a slice from 0 that costs this much.
  double end_of(double cost) const {
    return b > 0 ? (std::sqrt(a * a + 2 * b * cost) - a) / b : cost / std::max(a, 1e-300);
  }
};

// Fitted to each slice's seconds per position, at its middle.
Line line_of(const Cuts& cuts, const std::vector<double>& seconds) {
  const auto n = static_cast<double>(seconds.size());
  double x_sum = 0, y_sum = 0, xx_sum = 0, xy_sum = 0;
  for (size_t s = 0; s < seconds.size(); ++s) {
    const double x = static_cast<double>(cuts[s] + cuts[s + 1]) / 2;
    const double y = seconds[s] / static_cast<double>(cuts[s + 1] - cuts[s]);
    x_sum += x;
    y_sum += y;
    xx_sum += x * x;
    xy_sum += x * y;
  }
  const double spread = xx_sum - x_sum * x_sum / n;
  const double b = spread > 0 ? std::max(0.0, (xy_sum - x_sum * y_sum / n) / spread) : 0;
  return {std::max(0.0, (y_sum - b * x_sum) / n), b};
}

}  // namespace

std::vector<int> SliceProfiles::lengths() const {
  std::vector<int> lengths;
  for (size_t s = 1; s < cuts.size(); ++s) lengths.push_back(static_cast<int>(cuts[s] - cuts[s - 1]));
  return lengths;
}

int64_t sequence_length(const Fields& fields) {
  TWOBP_CHECK(!fields.empty(),
              "a micro-batch without fields has no sequences to cut into slices: set pipeline.slices to 1");
  const auto& [name, first] = *fields.begin();
  TWOBP_CHECK(first.dim() >= 2, "the field \"", name, "\" of sizes ", first.sizes(),
              " has no sequences to cut into slices: set pipeline.slices to 1");
  return first.size(1);
}

Cuts equal_cuts(int64_t positions, int slices) {
  std::vector<double> wanted;
  for (int s = 0; s <= slices; ++s) {
    wanted.push_back(static_cast<double>(positions) * s / slices);
  }
  return on_blocks(wanted, positions);
}

Cuts scaled_cuts(const Cuts& cuts, int64_t positions) {
  if (cuts.back() == positions) return cuts;
  std::vector<double> wanted;
  for (const int64_t cut : cuts) {
    wanted.push_back(static_cast<double>(cut) * static_cast<double>(positions) / static_cast<double>(cuts.back()));
  }
  const auto slices = static_cast<int64_t>(cuts.size()) - 1;
  return on_blocks(wanted, positions, positions >= slices * kSliceBlock ? kSliceBlock : 1);
}

Cuts growing_cuts(const ModelSpec& model, const SliceProfiles& measured, double growth) {
  std::vector<double> seconds;
  for (const Profile& profile : measured.profiles) {
    double sum = 0;
    for (const LayerCost& layer : layer_costs(model, profile)) sum += layer.seconds();
    seconds.push_back(sum);
  }
  const int64_t positions = measured.cuts.back();
  const Line line = line_of(measured.cuts, seconds);
  if (line.seconds(0, positions) == 0) return measured.cuts;
  double all = 0;
  for (size_t s = 0; s < seconds.size(); ++s) all += std::pow(growth, s);
  std::vector<double> wanted = {0};
  double part = 0;
  for (size_t s = 0; s < seconds.size(); ++s) {
    part += std::pow(growth, s) / all;
    wanted.push_back(line.end_of(part * line.seconds(0, positions)));
  }
  return on_blocks(wanted, positions);
}

SliceProfiles expected_slices(const SliceProfiles& measured, const Cuts& cuts) {
  SliceProfiles expected{cuts, std::vector<Profile>(cuts.size() - 1)};
  for (const auto& [kind, first] : measured.profiles.at(0)) {
    for (double LayerCost::*of : {&LayerCost::forward, &LayerCost::backward_p1, &LayerCost::backward_p2}) {
      std::vector<double> seconds;
      for (const Profile& profile : measured.profiles) seconds.push_back(profile.at(kind).*of);
      const Line line = line_of(measured.cuts, seconds);
      for (size_t s = 0; s + 1 < cuts.size(); ++s) {
        expected.profiles[s][kind].*of = line.seconds(cuts[s], cuts[s + 1]);
      }
    }
    for (Profile& profile : expected.profiles) profile[kind].p2_units = first.p2_units;
  }
  return expected;
}

Cuts fastest_cuts(const ModelSpec& model, const SliceProfiles& measured, const StepSeconds& step) {
  Cuts best = measured.cuts;
  double least = kFaster * step(expected_slices(measured, best));
  for (const double growth : {0.84, 0.88, 0.92, 0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06, 1.08, 1.12, 1.16}) {
    const Cuts cuts = growing_cuts(model, measured, growth);
    const double seconds = step(expected_slices(measured, cuts));
    if (seconds >= least) continue;
    least = seconds;
    best = cuts;
  }
  return best;
}

Profile sum_of(const SliceProfiles& slices) {
  Profile sum = slices.profiles.at(0);
  for (size_t s = 1; s < slices.profiles.size(); ++s) {
    for (auto& [kind, all] : sum) {
      const LayerCost& one = slices.profiles[s].at(kind);
      all.forward += one.forward;
      all.backward_p1 += one.backward_p1;
      all.backward_p2 += one.backward_p2;
      all.forward_rise += one.forward_rise;
      all.backward_p1_rise += one.backward_p1_rise;
      all.backward_p2_rise += one.backward_p2_rise;
      all.forward_held += one.forward_held;
      all.p1_held += one.p1_held;
      all.stash += one.stash;
      all.output += one.output;
      all.input_gradient += one.input_gradient;
      all.forward_to_experts += one.forward_to_experts;
      all.forward_from_experts += one.forward_from_experts;
      all.p1_to_experts += one.p1_to_experts;
      all.p1_from_experts += one.p1_from_experts;
      all.beside_experts += one.beside_experts;
      all.forward_peak = std::max(all.forward_peak, one.forward_peak);
      all.p1_peak = std::max(all.p1_peak, one.p1_peak);
      all.p2_peak = std::max(all.p2_peak, one.p2_peak);
    }
  }
  return sum;
}

namespace {

Cuts cuts_by_hand(const std::vector<int>& lengths, int64_t positions) {
  Cuts cuts = {0};
  for (const int length : lengths) cuts.push_back(cuts.back() + length);
  TWOBP_CHECK(cuts.back() == positions, "pipeline.slice_lengths add up to ", cuts.back(),
              " positions, but the sequences have ", positions, ": set data.sequence or the lengths.");
  return cuts;
}

}  // namespace

SliceProfiles measured_slices(const ModelSpec& model, const ProfiledBatch& batch, const PipelineConfig& config,
                              const Device& device, double seconds, const StepSeconds& step) {
  Cuts by_hand;
  if (!config.slice_lengths.empty()) by_hand = cuts_by_hand(config.slice_lengths, sequence_length(batch.fields));
  if (config.slices == 1) return {{}, {measure_profile(model, batch, seconds, device)}};
  if (!by_hand.empty()) return measure_slices(model, batch, by_hand, seconds, device);
  const Cuts equal = equal_cuts(sequence_length(batch.fields), config.slices);
  const SliceProfiles counted = count_operations_of_slices(model, batch, equal, device);
  const Cuts better = step ? fastest_cuts(model, counted, step) : growing_cuts(model, counted, /*growth=*/1);
  return measure_slices(model, batch, better, seconds, device);
}

SliceProfiles agreed_slices(Transport& processes, const ModelSpec& model, int slices,
                            const std::function<SliceProfiles()>& measure, double timeout) {
  SliceProfiles agreed;
  if (processes.rank() == 0) agreed = measure();
  if (processes.size() == 1) return agreed;
  if (processes.rank() != 0) {
    agreed.profiles.resize(slices);
    for (Profile& profile : agreed.profiles) {
      for (const LayerSpec& layer : model.layers) profile[layer.kind] = {};
    }
    if (slices > 1) agreed.cuts.resize(slices + 1);
  }
  at::Tensor cuts = at::empty({static_cast<int64_t>(agreed.cuts.size())}, at::kLong);
  std::copy(agreed.cuts.begin(), agreed.cuts.end(), cuts.mutable_data_ptr<int64_t>());
  if (slices > 1) broadcast(processes, cuts, 0, timeout);
  std::copy_n(cuts.const_data_ptr<int64_t>(), agreed.cuts.size(), agreed.cuts.begin());
  for (Profile& profile : agreed.profiles) {
    at::Tensor numbers = pack_profile(profile);
    broadcast(processes, numbers, 0, timeout);
    unpack_profile(numbers, profile);
  }
  return agreed;
}

}  // namespace twobp
