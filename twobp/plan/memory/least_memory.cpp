#include "twobp/plan/memory/least_memory.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/plan/partition/partition.h"

namespace twobp {
namespace {

double fixed_bytes(const CostModel& model, const PlanChoice& choice, size_t layer) {
  const KindCosts& kind = model.kinds.at(model.layers[layer].kind);
  if (static_cast<int>(layer) < model.first_trainable) return kind.parameter_bytes;
  const double streamable = std::max(0.0, kind.gradient_bytes - kind.at_size.front().tied_gradient);
  return kind.fixed_bytes(choice.data_parallel) - (choice.streams ? streamable : 0);
}

// Whether every stage of `a` holds at least as many as in `b`.
bool covers(const std::vector<int>& a, const std::vector<int>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] < b[i]) return false;
  }
  return true;
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
  const OrderBytes& order = order_of(choice);
  const auto costs = stage_costs(model_for(models_, choice), choice.split, choice.micro_batch_size, choice.slices,
                                 {order.rank_of_stage(), choice.data_parallel, one_memory_});
  return order.least(choice.streams ? without_gradients(costs) : costs);
}

double LeastMemory::of_all_ranks(const PlanChoice& choice) {
  const auto [at, is_new] = least_.try_emplace(
      {choice.micro_batch_size, choice.slices, choice.recompute, choice.streams, choice.data_parallel});
  if (is_new) {
    const CostModel& model = model_for(models_, choice);
    std::set<std::string> tied;  // at least one rank has them
    for (size_t l = 0; l < model.layers.size(); ++l) {
      at->second.bytes += fixed_bytes(model, choice, l);
      for (const auto& [name, bytes] : model.kinds.at(model.layers[l].kind).tied)
        at->second.bytes -= tied.insert(name).second ? 0 : bytes.weight + bytes.gradient;
    }
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
  const auto [at, is_new] =
      within_.try_emplace({order.rank_of_stage(), order.in_flight(), choice.micro_batch_size, choice.slices,
                           choice.recompute, choice.streams, choice.data_parallel, memory > 0});
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
  for (size_t l = 0; l < model.layers.size(); ++l) bytes.fixed.push_back(fixed_bytes(model, choice, l));
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

OrderBytes::OrderBytes(const Schedule& schedule)
    : slices_(schedule.slices),
      rank_of_stage_(schedule.rank_of_stage),
      in_flight_(schedule.stages, 0),
      stages_of_rank_(schedule.ranks.size()),
      moments_(schedule.ranks.size()) {
  std::vector<int> place(schedule.stages);  // index among the stages of its rank
  for (int stage = 0; stage < schedule.stages; ++stage) {
    auto& stages = stages_of_rank_[rank_of_stage_[stage]];
    place[stage] = static_cast<int>(stages.size());
    stages.push_back(stage);
  }
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    std::vector<int> held(stages_of_rank_[rank].size() * slices_, 0);
    std::vector<int> of_stage(stages_of_rank_[rank].size(), 0);
    for (const Instruction& i : schedule.ranks[rank]) {
      const bool forward = i.op == Op::kForward;
      if (!forward && i.op != Op::kBackwardP1 && i.op != Op::kBackward) continue;
      for (int m = i.micro_batch; m < i.micro_batch + i.count; ++m) {
        const int slice = m % slices_;
        if (forward) add(moments_[rank], {i.stage, slice, held});
        held[place[i.stage] * slices_ + slice] += forward ? 1 : -1;
        of_stage[place[i.stage]] += forward ? 1 : -1;
      }
      in_flight_[i.stage] = std::max(in_flight_[i.stage], of_stage[place[i.stage]]);
    }
  }
}

void OrderBytes::add(std::vector<Moment>& moments, Moment moment) {
  const auto same = [&](const Moment& other) { return other.stage == moment.stage && other.slice == moment.slice; };
  for (const Moment& other : moments) {
    if (same(other) && covers(other.held, moment.held)) return;
  }
  std::erase_if(moments, [&](const Moment& other) { return same(other) && covers(moment.held, other.held); });
  moments.push_back(std::move(moment));
}

double OrderBytes::least(const std::vector<StageCost>& costs) const {
  const size_t count = rank_of_stage_.size();
  const auto bytes = stage_bytes(costs, static_cast<int>(count), slices_);
  const auto of = [&](int stage, int slice) -> const StageBytes& {
    return bytes[costs.size() == count ? stage : slice * count + stage];
  };
  double most = 0;
  for (size_t rank = 0; rank < moments_.size(); ++rank) {
    const auto& stages = stages_of_rank_[rank];
    double fixed = 0;
    for (const int stage : stages) fixed += costs[stage].fixed_bytes;
    double peak = 0;
    for (const Moment& moment : moments_[rank]) {
      double held = 0;
      for (size_t i = 0; i < moment.held.size(); ++i) {
        const StageBytes& each = of(stages[i / slices_], static_cast<int>(i % slices_));
        // Inconsistent costs may take away bytes that another micro-batch has brought.
        held += moment.held[i] * (each.activation - each.deficit);
      }
      const StageBytes& next = of(moment.stage, moment.slice);
      peak = std::max(peak, held + std::max(next.forward_peak, next.activation) - next.deficit);
    }
    most = std::max(most, fixed + peak);
  }
  return most;
}

}  // namespace twobp
