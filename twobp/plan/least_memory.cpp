#include "twobp/plan/least_memory.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/plan/partition/partition.h"

namespace twobp {
namespace {

double fixed_bytes(const CostModel& model, size_t layer) {
  const KindCosts& kind = model.kinds.at(model.layers[layer].kind);
  return static_cast<int>(layer) >= model.first_trainable ? kind.fixed_bytes() : kind.parameter_bytes;
}

}  // namespace

const CostModel& model_for(const ModelsByRecompute& models, const PlanChoice& choice) {
  const auto at =
      std::find_if(models.begin(), models.end(), [&](const auto& model) { return model.first == choice.recompute; });
  return at->second;
}

const OrderBytes& LeastMemory::order_of(const PlanChoice& choice) {
  const std::tuple key(choice.schedule.name(), choice.stages, choice.ranks, choice.micro_batches, choice.slices);
  auto at = orders_.find(key);
  if (at == orders_.end()) {
    at = orders_
             .emplace(key, OrderBytes(choice.schedule.make(choice.stages, choice.ranks, choice.micro_batches,
                                                           P2Policy::kOff, choice.slices)))
             .first;
  }
  return at->second;
}

double LeastMemory::of_order(const PlanChoice& choice) {
  return order_of(choice).least(
      stage_costs(model_for(models_, choice), choice.split, choice.micro_batch_size, choice.slices));
}

double LeastMemory::of_all_ranks(const PlanChoice& choice) {
  const auto [at, is_new] = least_.try_emplace({choice.micro_batch_size, choice.slices, choice.recompute});
  if (is_new) {
    const CostModel& model = model_for(models_, choice);
    for (size_t l = 0; l < model.layers.size(); ++l) at->second.bytes += fixed_bytes(model, l);
    for (const auto& layers : slice_costs_at(model, choice.micro_batch_size, choice.slices)) {
      double output = 0;
      for (const LayerCost& layer : layers) {
        at->second.bytes += layer.forward_held;
        output = std::max(output, layer.output);
      }
      at->second.output += output;
    }
  }
  return at->second.bytes - choice.stages * at->second.output;
}

bool LeastMemory::split_within(double memory, PlanChoice& choice) {
  const OrderBytes& order = order_of(choice);
  const auto [at, is_new] = within_.try_emplace(
      {order.rank_of_stage(), order.in_flight(), choice.micro_batch_size, choice.slices, choice.recompute, memory > 0});
  if (is_new) at->second = make_split_within(memory, choice, order);
  if (!at->second.empty()) choice.split = at->second;
  return !at->second.empty();
}

std::vector<int> LeastMemory::make_split_within(double memory, const PlanChoice& choice,
                                                const OrderBytes& order) const {
  const CostModel& model = model_for(models_, choice);
  PartitionBytes bytes;
  const std::vector<double> seconds = layer_seconds_at(model, choice.micro_batch_size, choice.slices);
  double peak = 0;  // in addition to the held bytes, while a layer runs
  for (size_t l = 0; l < model.layers.size(); ++l) bytes.fixed.push_back(fixed_bytes(model, l));
  bytes.held.assign(model.layers.size(), 0);  // the mean of the slices
  for (const auto& layers : slice_costs_at(model, choice.micro_batch_size, choice.slices)) {
    for (size_t l = 0; l < layers.size(); ++l) {
      const LayerCost& cost = layers[l];
      bytes.held[l] += std::max(0.0, cost.forward_held) / choice.slices;
      peak = std::max({peak, cost.forward_peak - cost.forward_held, cost.p1_peak, cost.p2_peak});
    }
  }
  bytes.in_flight = order.in_flight();
  if (memory == 0) return lightest_split(bytes, order.rank_of_stage());
  if (memory <= peak) return {};
  bytes.caps.assign(choice.ranks, memory - peak);
  try {
    return balanced_split(seconds, order.rank_of_stage(), bytes);
  } catch (const Error&) {  // no split keeps the caps
    return {};
  }
}

}  // namespace twobp
