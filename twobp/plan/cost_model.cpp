#include "twobp/plan/cost_model.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>

#include "twobp/core/balanced_order.h"
#include "twobp/core/check.h"
#include "twobp/core/recompute_mode.h"
#include "twobp/core/text.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/schedule/simulate/for_training.h"

namespace twobp {
namespace {

constexpr double kRounding = 1e-6;  // of the costs of samples

void check_number(double value, const std::string& what) {
  TWOBP_CHECK(value >= 0 && value <= kMostCost, what, " is ", value, ": must be from 0 to ", kMostCost);
}

// a + (b - a) x, for every number.
LayerCost between(const LayerCost& a, const LayerCost& b, double x) {
  LayerCost costs;
  for (const auto number : kLayerNumbers) costs.*number = a.*number + (b.*number - a.*number) * x;
  costs.p2_units = b.p2_units;
  costs.expert_gradient = b.expert_gradient;  // of the weights, whatever the size
  costs.tied_gradient = b.tied_gradient;
  costs.p1_gradient = b.p1_gradient;
  costs.streamed_gradient = b.streamed_gradient;
  costs.streamed_unit = b.streamed_unit;
  return costs;
}

LayerCost at_size(const CostModel& model, const std::vector<LayerCost>& costs, int size) {
  const auto& sizes = model.micro_batch_sizes;
  const auto above = std::lower_bound(sizes.begin(), sizes.end(), size);
  const size_t i = above - sizes.begin();
  if (above != sizes.end() && *above == size) return costs[i];
  if (i > 0 && above != sizes.end()) {
    const double x = static_cast<double>(size - sizes[i - 1]) / (sizes[i] - sizes[i - 1]);
    return between(costs[i - 1], costs[i], x);
  }
  const size_t nearest = i == 0 ? 0 : i - 1;
  return between(LayerCost(), costs[nearest], static_cast<double>(size) / sizes[nearest]);
}

// A rise may not make the seconds of any samples negative.
void check_rise(double seconds, double rise, const std::vector<double>& sample_costs, const std::string& what) {
  TWOBP_CHECK(std::abs(rise) <= kMostCost, what, " rise is ", rise, " seconds: must be from ", -kMostCost, " to ",
              kMostCost);
  if (sample_costs.empty()) return;
  for (const double samples : {sample_costs.front(), sample_costs.back()}) {
    const double then = seconds + rise * (samples - 1);
    TWOBP_CHECK(then >= -kRounding * seconds, what, " would take ", then, " seconds for samples that cost ", samples,
                " times the mean: the rise is ", rise, " seconds, but must leave at least 0");
  }
}

void check_costs(const LayerCost& cost, const std::vector<double>& sample_costs, const std::string& where) {
  check_number(cost.forward, where + " forward seconds");
  TWOBP_CHECK(cost.forward > 0, where, " forward seconds are 0: F takes time, was the layer measured?");
  check_number(cost.backward_p1, where + " backward-p1 seconds");
  check_number(cost.backward_p2, where + " backward-p2 seconds");
  TWOBP_CHECK(cost.p2_units >= 0, where, " p2 units are ", cost.p2_units, ": must not be negative");
  TWOBP_CHECK(cost.p2_units > 0 || cost.backward_p2 == 0, where, " has backward-p2 seconds, but no p2 units");
  TWOBP_CHECK(cost.p2_units > 0 || cost.stash == 0, where, " has stash bytes, but no p2 units to free them");
  check_number(cost.forward_peak, where + " peak bytes during forward");
  check_number(cost.p1_peak, where + " peak bytes during backward-p1");
  check_number(cost.p2_peak, where + " peak bytes during backward-p2");
  check_number(cost.stash, where + " stash bytes");
  check_number(cost.output, where + " output bytes");
  check_number(cost.input_gradient, where + " input gradient bytes");
  check_number(cost.forward_to_experts, where + " bytes to experts in forward");
  check_number(cost.forward_from_experts, where + " bytes from experts in forward");
  check_number(cost.p1_to_experts, where + " bytes to experts in backward-p1");
  check_number(cost.p1_from_experts, where + " bytes from experts in backward-p1");
  check_number(cost.beside_experts, where + " seconds beside tokens of experts");
  check_rise(cost.forward, cost.forward_rise, sample_costs, where + " forward");
  check_rise(cost.backward_p1, cost.backward_p1_rise, sample_costs, where + " backward-p1");
  check_rise(cost.backward_p2, cost.backward_p2_rise, sample_costs, where + " backward-p2");
  TWOBP_CHECK(std::abs(cost.forward_held) <= kMostCost && std::abs(cost.p1_held) <= kMostCost, where,
              " bytes held after forward or backward-p1 are beyond ", kMostCost);
}

// The costs of all layers; `of_kind` gives a kind's costs at the measured sizes.
template <typename OfKind>
std::vector<LayerCost> costs_of_layers(const CostModel& model, int micro_batch_size, OfKind&& of_kind) {
  TWOBP_CHECK(micro_batch_size >= 1, "a micro-batch has at least 1 sample, not ", micro_batch_size);
  std::vector<LayerCost> costs;
  for (const ModelLayer& layer : model.layers) {
    const auto kind = model.kinds.find(layer.kind);
    TWOBP_CHECK(kind != model.kinds.end(), "the cost model has no kind '", layer.kind, "'");
    costs.push_back(at_size(model, of_kind(kind->second), micro_batch_size));
  }
  leave_out_backward(costs, model.first_trainable);
  return costs;
}

// The place of so many slices in CostModel::slice_lengths; its size if they were not measured.
size_t place_of(const CostModel& model, int slices) {
  const auto& all = model.slice_lengths;
  return std::find_if(all.begin(), all.end(),
                      [&](const auto& lengths) { return std::cmp_equal(lengths.size(), slices); }) -
         all.begin();
}

// The same; throws Error if they were not measured.
size_t known_place_of(const CostModel& model, int slices) {
  const size_t place = place_of(model, slices);
  if (place < model.slice_lengths.size()) return place;
  std::vector<std::string> counts = {"1"};
  for (const auto& lengths : model.slice_lengths) counts.push_back(std::to_string(lengths.size()));
  fail("there are no costs of ", slices, " slices, but only of ", join(counts), ": measure again with --slices ",
       slices);
}

void check_slices(const CostModel& model, const KindCosts& kind, const std::string& where) {
  if (kind.in_slices.empty()) return;  // measured whole, as a layer that computes W again
  TWOBP_CHECK(kind.in_slices.size() == model.slice_lengths.size(), where, " costs for ", kind.in_slices.size(),
              " ways to cut into slices, but the model has ", model.slice_lengths.size());
  for (size_t way = 0; way < kind.in_slices.size(); ++way) {
    const auto& slices = kind.in_slices[way];
    const size_t count = model.slice_lengths[way].size();
    TWOBP_CHECK(slices.size() == count, where, " costs of ", slices.size(), " slices, but this way to cut has ", count);
    for (size_t slice = 0; slice < count; ++slice) {
      TWOBP_CHECK(slices[slice].size() == model.micro_batch_sizes.size(), where, " slice ", slice, " of ", count,
                  ": costs at ", slices[slice].size(), " micro-batch sizes, but the model has ",
                  model.micro_batch_sizes.size());
      for (size_t i = 0; i < slices[slice].size(); ++i) {
        const std::string at =
            concat(where, " slice ", slice, " of ", count, ", micro-batch size ", model.micro_batch_sizes[i], ":");
        check_costs(slices[slice][i], model.sample_costs, at);
        TWOBP_CHECK(slices[slice][i].p2_units == slices[0][i].p2_units, at, " ", slices[slice][i].p2_units,
                    " p2 units, but slice 0 has ", slices[0][i].p2_units);
      }
    }
  }
}

void check_lengths(const std::vector<std::vector<int>>& all) {
  for (size_t i = 0; i < all.size(); ++i) {
    const size_t slices = all[i].size();
    TWOBP_CHECK(slices >= 2, "slices ", i, ": a sequence is cut into at least 2, not ", slices);
    for (const int length : all[i])
      TWOBP_CHECK(length >= 1, slices, " slices: one has ", length, " positions, but at least 1 is needed");
    for (size_t other = 0; other < i; ++other) {
      TWOBP_CHECK(all[other].size() != slices, slices, " slices are there twice");
      const auto sum = [](const auto& of) { return std::accumulate(of.begin(), of.end(), int64_t{0}); };
      TWOBP_CHECK(sum(all[i]) == sum(all[other]), slices, " slices add up to ", sum(all[i]), " positions, ",
                  all[other].size(), " slices to ", sum(all[other]));
    }
  }
}

void check_sample_costs(const std::vector<double>& costs) {
  double sum = 0;
  for (size_t i = 0; i < costs.size(); ++i) {
    check_number(costs[i], concat("the cost of samples ", i));
    // Means of equal costs may differ in the last digits.
    TWOBP_CHECK(i == 0 || costs[i] >= costs[i - 1] * (1 - kRounding), "the costs of samples fall from ", costs[i - 1],
                " to ", costs[i], ": give the cheapest first");
    sum += costs[i];
  }
  const double mean = sum / static_cast<double>(std::max<size_t>(1, costs.size()));
  TWOBP_CHECK(costs.empty() || std::abs(mean - 1) < kRounding, "the costs of samples have a mean of ", mean,
              ", but they are relative to their mean, so it must be 1");
}

// The stages' costs for sequences, or slices, with these costs of layers.
std::vector<StageCost> stages_of(const CostModel& model, const std::vector<int>& split,
                                 const std::vector<LayerCost>& layers, const WeightPlaces& places) {
  std::vector<StageCost> stages;
  std::map<std::pair<int, std::string>, size_t> tied;  // by rank and name: the stage of the first use
  size_t layer = 0;
  for (const int count : split) {
    const auto begin = layers.begin() + static_cast<std::ptrdiff_t>(layer);
    StageCost stage = stage_of({begin, begin + count});
    for (LayerCost& cost : stage.layers) {
      const KindCosts& kind = model.kinds.at(model.layers[layer].kind);
      const bool trained = static_cast<int>(layer) >= model.first_trainable;
      stage.optimizer += trained ? kind.optimizer_seconds : 0;
      if (trained) stage.update_bytes = std::max(stage.update_bytes, kind.update_bytes);
      stage.gradient_bytes += trained ? kind.gradient_bytes : 0;
      stage.fixed_bytes += trained ? kind.fixed_bytes(places.replicas) : kind.parameter_bytes;
      const int own =
          places.rank_of_stage.empty() ? static_cast<int>(stages.size()) : places.rank_of_stage.at(stages.size());
      const int rank = places.one_memory ? 0 : own;
      for (const auto& [name, bytes] : kind.tied) {
        const auto [first, is_first] = tied.try_emplace({rank, name}, stages.size());
        if (is_first) continue;
        stage.fixed_bytes -= bytes.weight;
        (first->second < stages.size() ? stages[first->second] : stage).fixed_bytes -= bytes.gradient;
      }
      cost.gradient_bytes = trained ? kind.gradient_bytes : 0;
      cost.expert_gradient = std::min(cost.expert_gradient, cost.gradient_bytes);
      cost.tied_gradient = std::min(cost.tied_gradient, cost.gradient_bytes);
      cost.p1_gradient = std::min(cost.p1_gradient, cost.streamable());
      if (cost.streamed_gradient == 0 || !trained) cost.streamed_gradient = cost.streamable();  // not measured
      ++layer;
    }
    stages.push_back(std::move(stage));
  }
  return stages;
}

// With so many samples, those of more replicas hardly change the first one's.
constexpr size_t kMostSamples = 4096;

// `input`: bytes of the layer's input.
LayerCost recomputed(const LayerCost& was, double input, bool in_p1, bool in_p2) {
  LayerCost cost = was;
  const double saved = was.forward_held - was.output;  // by F, in addition to the input
  if (in_p1) {
    cost.backward_p1 += was.forward;
    cost.backward_p1_rise += was.forward_rise;
    cost.p1_to_experts += was.forward_to_experts + was.forward_from_experts;
    cost.forward_held = was.output;
    cost.p1_peak = std::max(was.forward_peak, saved + was.p1_peak);
    cost.p1_held = saved + was.p1_held;
  }
  if (in_p2 && was.p2_units > 0) {
    cost.backward_p2 += was.forward + was.backward_p1;
    cost.backward_p2_rise += was.forward_rise + was.backward_p1_rise;
    cost.p2_units = 1;
    cost.streamed_gradient = cost.streamed_unit = cost.streamed_stash = 0;  // W of the whole layer
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

void check_cost_model(const CostModel& model) {
  TWOBP_CHECK(!model.layers.empty(), "a cost model needs layers");
  TWOBP_CHECK(!model.micro_batch_sizes.empty(), "a cost model needs at least one micro-batch size");
  for (size_t i = 0; i < model.micro_batch_sizes.size(); ++i) {
    const int size = model.micro_batch_sizes[i];
    TWOBP_CHECK(size >= 1 && (i == 0 || size > model.micro_batch_sizes[i - 1]), "micro-batch size ", size,
                ": sizes must be at least 1 and rising");
  }
  TWOBP_CHECK(model.first_trainable >= 0 && model.first_trainable <= static_cast<int>(model.layers.size()),
              "first_trainable is ", model.first_trainable, ", but must be from 0 to ", model.layers.size(),
              ", the number of layers");
  for (const ModelLayer& layer : model.layers) {
    TWOBP_CHECK(model.kinds.contains(layer.kind), "layer '", layer.name, "' is of kind '", layer.kind,
                "', which has no costs");
  }
  check_lengths(model.slice_lengths);
  check_sample_costs(model.sample_costs);
  for (const auto& [name, kind] : model.kinds) {
    const std::string where = concat("kind '", name, "':");
    TWOBP_CHECK(kind.at_size.size() == model.micro_batch_sizes.size(), where, " costs at ", kind.at_size.size(),
                " micro-batch sizes, but the model has ", model.micro_batch_sizes.size());
    check_number(kind.parameters, where + " number of parameters");
    check_number(kind.parameter_bytes, where + " parameter bytes");
    check_number(kind.gradient_bytes, where + " gradient bytes");
    check_number(kind.optimizer_bytes, where + " optimizer bytes");
    check_number(kind.optimizer_seconds, where + " optimizer seconds");
    check_number(kind.update_bytes, where + " bytes of the update");
    check_number(kind.sharded_bytes, where + " sharded bytes");
    double once = kind.sharded_bytes;
    for (const auto& [weight, bytes] : kind.tied) {
      check_number(bytes.weight, concat(where, " bytes of tied weight '", weight, "'"));
      check_number(bytes.gradient, concat(where, " gradient bytes of tied weight '", weight, "'"));
      once += bytes.weight + bytes.gradient;
    }
    TWOBP_CHECK(once <= kind.fixed_bytes() * (1 + kRounding), where, " sharded and tied bytes are ", once,
                ", more than all: ", kind.fixed_bytes());
    for (size_t i = 0; i < kind.at_size.size(); ++i) {
      check_costs(kind.at_size[i], model.sample_costs,
                  concat(where, " micro-batch size ", model.micro_batch_sizes[i], ":"));
    }
    check_slices(model, kind, where);
  }
  check_number(model.link_latency, "link latency");
  check_number(model.link_bytes_per_second, "link bytes per second");
}

std::vector<LayerCost> layer_costs_at(const CostModel& model, int micro_batch_size) {
  return costs_of_layers(
      model, micro_batch_size, [](const KindCosts& kind) -> const auto& { return kind.at_size; });
}

std::vector<std::vector<LayerCost>> slice_costs_at(const CostModel& model, int micro_batch_size, int slices) {
  if (slices == 1) return {layer_costs_at(model, micro_batch_size)};
  const size_t place = known_place_of(model, slices);
  TWOBP_CHECK(has_slices(model, slices), "some layers were not measured in ", slices, " slices");
  std::vector<std::vector<LayerCost>> costs;
  for (int slice = 0; slice < slices; ++slice) {
    costs.push_back(costs_of_layers(
        model, micro_batch_size, [&](const KindCosts& kind) -> const auto& { return kind.in_slices[place][slice]; }));
  }
  return costs;
}

std::vector<double> layer_seconds_at(const CostModel& model, int micro_batch_size, int slices) {
  std::vector<double> seconds(model.layers.size(), 0);
  for (const auto& layers : slice_costs_at(model, micro_batch_size, slices)) {
    for (size_t i = 0; i < layers.size(); ++i) seconds[i] += layers[i].seconds();
  }
  return seconds;
}

std::vector<int> slice_lengths(const CostModel& model, int slices) {
  if (slices == 1) return {};
  return model.slice_lengths[known_place_of(model, slices)];
}

bool has_slices(const CostModel& model, int slices) {
  if (slices == 1) return true;
  return place_of(model, slices) < model.slice_lengths.size() &&
         std::all_of(model.layers.begin(), model.layers.end(), [&](const ModelLayer& layer) {
           const auto kind = model.kinds.find(layer.kind);
           return kind != model.kinds.end() && !kind->second.in_slices.empty();
         });
}

std::vector<StageCost> stage_costs(const CostModel& model, const std::vector<int>& split, int micro_batch_size,
                                   int slices, const WeightPlaces& places) {
  check_split(split, static_cast<int>(model.layers.size()), static_cast<int>(split.size()));
  std::vector<StageCost> costs;
  for (const auto& layers : slice_costs_at(model, micro_batch_size, slices)) {
    for (StageCost& stage : stages_of(model, split, layers, places)) costs.push_back(std::move(stage));
  }
  return costs;
}

SimulationOptions simulation_options(const CostModel& model) {
  SimulationOptions options = in_process_simulation();
  options.message_seconds = model.link_latency;
  options.bytes_per_second = model.link_bytes_per_second;
  return options;
}

std::vector<double> typical_batch(const std::vector<double>& sample_costs, const BatchShape& shape) {
  if (sample_costs.empty()) return {};
  const auto size = static_cast<size_t>(shape.micro_batch_size);
  const auto micro_batches = static_cast<size_t>(shape.micro_batches);
  const auto most = static_cast<int>(std::max<size_t>(1, kMostSamples / (micro_batches * size)));
  const int replicas = std::min(shape.replicas, most);
  const std::vector<double> costs = means_of_parts(sample_costs, replicas * micro_batches * size);
  std::vector<int64_t> whole;  // as datasets give them
  for (const double cost : costs) whole.push_back(std::llround(cost * 1e6));
  const auto order = balanced_order(whole, replicas, shape.micro_batches, shape.micro_batch_size);
  std::vector<double> batch(micro_batches, 0);
  for (size_t i = 0; i < micro_batches * size; ++i) {
    batch[i / size] += costs[order[i]] / static_cast<double>(size);
  }
  return batch;
}

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
