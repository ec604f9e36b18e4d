#include "twobp/plan/auto_schedule/problem.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulator.h"

namespace twobp {
namespace {

constexpr double kTolerance = 1e-9;  // as in simulate
constexpr double kMostTasks = 5e6;   // the search goes over all of them dozens of times

bool same_bytes(const StageCost& a, const StageCost& b) {
  if (a.layers.size() != b.layers.size()) return false;
  for (size_t i = 0; i < a.layers.size(); ++i) {
    for (const auto bytes : {&LayerCost::forward_peak, &LayerCost::forward_held, &LayerCost::p1_peak,
                             &LayerCost::p1_held, &LayerCost::stash, &LayerCost::p2_peak}) {
      if (a.layers[i].*bytes != b.layers[i].*bytes) return false;
    }
  }
  return a.activation_bytes == b.activation_bytes && a.stash_bytes == b.stash_bytes &&
         a.output_bytes == b.output_bytes && a.input_gradient_bytes == b.input_gradient_bytes &&
         a.p2_units == b.p2_units;
}

void check_costs(const std::vector<int>& rank_of_stage, const std::vector<StageCost>& costs, int micro_batches,
                 int slices) {
  const size_t stages = rank_of_stage.size();
  const size_t of_slices = stages * slices;
  TWOBP_CHECK(costs.size() == stages || costs.size() == of_slices || costs.size() == of_slices * micro_batches,
              "a pipeline of ", stages, " stages needs as many costs, ",
              slices > 1 ? concat("or ", of_slices, " for its ", slices, " slices, ") : "", "or ",
              of_slices * micro_batches, " for its ", micro_batches, " micro-batches, got ", costs.size());
  for (size_t s = 0; s < stages; ++s) {
    TWOBP_CHECK(rank_of_stage[s] >= 0 && rank_of_stage[s] < (1 << 20), "stage ", s, " is placed on rank ",
                rank_of_stage[s], ", which does not exist");
  }
  for (size_t i = 0; i < costs.size(); ++i) {
    check_stage_cost(costs[i], static_cast<int>(i % stages));
    TWOBP_CHECK(i < of_slices || same_bytes(costs[i], costs[i % of_slices]), "the costs of micro-batch ", i / of_slices,
                " in stage ", i % stages,
                " take other bytes than those of micro-batch 0: a schedule can be searched for equal bytes only");
  }
}

}  // namespace

PipelineProblem::PipelineProblem(std::vector<int> rank_of_stage, int micro_batches, std::vector<StageCost> costs,
                                 const SimulationOptions& options, int slices)
    : rank_of_stage_(std::move(rank_of_stage)),
      slices_(slices),
      units_(micro_batches),
      rows_(static_cast<int>(costs.size() / std::max<size_t>(1, rank_of_stage_.size()))),
      costs_(std::move(costs)) {
  TWOBP_CHECK(!rank_of_stage_.empty() && micro_batches >= 1 && slices >= 1,
              "a schedule needs at least one stage, one micro-batch and one slice, got ", rank_of_stage_.size(), ", ",
              micro_batches, " and ", slices);
  check_costs(rank_of_stage_, costs_, micro_batches, slices);
  TWOBP_CHECK(
      3.0 * static_cast<double>(rank_of_stage_.size()) * micro_batches *
              slices<kMostTasks, rank_of_stage_.size(), " stages and ", micro_batches, " micro-batches", slices> 1
          ? concat(" of ", slices, " slices")
          : "",
      " are too many to search a schedule for");
  units_ *= slices;
  const std::vector<double> least = least_activation_bytes(rank_of_stage_, costs_, slices);
  bytes_ = stage_bytes(costs_, stages(), slices);
  for (const auto seconds : {&StageCost::forward, &StageCost::backward_p1, &StageCost::backward_p2}) {
    for (int stage = 0; stage < stages(); ++stage) {
      double sum = 0;
      for (int row = 0; row < rows_; ++row) sum += costs_[index(stage, row)].*seconds;
      mean_seconds_.push_back(sum / rows_);
    }
  }
  set_delays(options);
  peak_.resize(3 * costs_.size());
  for (size_t i = 0; i < costs_.size(); ++i) {
    StageCost& cost = costs_[i];
    const StageBytes& bytes = bytes_[i];
    cost.activation_bytes = bytes.activation;
    cost.stash_bytes = bytes.stash;
    cost.p2_units = bytes.p2_units;
    cost.layers.clear();
    peak_[i] = std::max(bytes.forward_peak, bytes.activation);
    peak_[costs_.size() + i] = std::max(bytes.p1_peak, bytes.stash - bytes.activation + bytes.for_others);
    peak_[2 * costs_.size() + i] = bytes.p2_peak;
  }
  stages_of_rank_.resize(least.size());
  optimizer_.resize(least.size(), 0);
  cap_.resize(least.size(), std::numeric_limits<double>::infinity());
  for (int stage = 0; stage < stages(); ++stage) {
    stages_of_rank_[rank_of_stage_[stage]].push_back(stage);
    optimizer_[rank_of_stage_[stage]] += costs_[stage].optimizer;
  }
  const auto& caps = options.cap_per_rank;
  TWOBP_CHECK(caps.empty() || caps.size() == least.size(), "cap_per_rank has ", caps.size(), " entries for ",
              least.size(), " ranks: give one for each rank, or none");
  for (size_t rank = 0; rank < least.size(); ++rank) {
    TWOBP_CHECK(!stages_of_rank_[rank].empty(), "rank ", rank, " has no stage");
    if (caps.empty()) continue;
    TWOBP_CHECK(std::isfinite(caps[rank]) && caps[rank] >= 0, "cap_per_rank holds ", caps[rank],
                ", must be finite and not negative (0: no cap)");
    if (caps[rank] == 0) continue;
    cap_[rank] = caps[rank] * (1 + kTolerance);
    if (least[rank] > cap_[rank]) throw NoScheduleFits(concat("no schedule fits the cap of rank ", rank));
  }
}

void PipelineProblem::set_delays(const SimulationOptions& options) {
  const auto check = [](double value, const char* what) {
    TWOBP_CHECK(std::isfinite(value) && value >= 0, what, " is ", value, ", must be finite and not negative");
  };
  check(options.message_seconds, "message_seconds");
  check(options.bytes_per_second, "bytes_per_second");
  std::map<std::pair<int, int>, const SharedLink*> shared;
  for (const SharedLink& link : options.shared_links) {
    check(link.latency, "the latency of a shared link");
    check(link.bytes_per_second, "the bytes_per_second of a shared link");
    for (const auto& between : link.between) shared.emplace(between, &link);
  }
  delay_.resize(2 * costs_.size(), 0);
  const auto set = [&](Op op, size_t from, size_t to, double bytes) {
    const int sends = rank_of_stage_[from % stages()];
    const int receives = rank_of_stage_[to % stages()];
    if (sends == receives) return;
    const auto link = shared.find({sends, receives});
    const bool own = link == shared.end();
    const double speed = own ? options.bytes_per_second : link->second->bytes_per_second;
    delay_[static_cast<size_t>(op) * costs_.size() + to] =
        (own ? options.message_seconds : link->second->latency) + (speed > 0 ? bytes / speed : 0);
  };
  for (size_t i = 0; i < costs_.size(); ++i) {
    if ((i + 1) % stages() == 0) continue;
    set(Op::kForward, i, i + 1, costs_[i].output_bytes);
    set(Op::kBackwardP1, i + 1, i, costs_[i + 1].input_gradient_bytes);
  }
}

double PipelineProblem::seconds(int task, bool fused) const {
  const StageCost& cost = this->cost(stage(task), unit(task));
  switch (op(task)) {
    case Op::kForward:
      return cost.forward;
    case Op::kBackwardP1:
      return cost.backward_p1 + (fused ? cost.backward_p2 : 0);
    default:
      return cost.backward_p2;
  }
}

double PipelineProblem::bytes(int task, bool fused) const {
  const StageCost& cost = this->cost(stage(task), unit(task));
  switch (op(task)) {
    case Op::kForward:
      return cost.activation_bytes;
    case Op::kBackwardP1:
      return (fused ? 0 : cost.stash_bytes) - cost.activation_bytes +
             stage_bytes_of(stage(task), unit(task)).for_others;
    default:
      return -cost.stash_bytes;
  }
}

double PipelineProblem::peak(int task, bool fused) const {
  if (fused && op(task) == Op::kBackwardP1) return std::max(0.0, bytes(task, true));
  return peak_[at_op(task)];
}

int PipelineProblem::sender(int task) const {
  const Op kind = op(task);
  const int from = stage(task) + (kind == Op::kForward ? -1 : 1);
  if (kind == Op::kBackwardP2 || from < 0 || from >= stages() || rank_of_stage_[from] == rank(task)) return -1;
  return this->task(kind, from, place(task));
}

int PipelineProblem::receiver(int task) const {
  const Op kind = op(task);
  const int to = stage(task) + (kind == Op::kForward ? 1 : -1);
  if (kind == Op::kBackwardP2 || to < 0 || to >= stages() || rank_of_stage_[to] == rank(task)) return -1;
  return this->task(kind, to, place(task));
}

bool PipelineProblem::precedes(int a, int b, bool b_fused) const {
  const Op kind = op(a);
  // All slices of a micro-batch go forward through all stages before its first I.
  if (kind == Op::kForward && op(b) != Op::kForward) return micro_batch(a) <= micro_batch(b);
  if (place(a) > place(b)) return false;
  const bool earlier = place(a) < place(b);
  if (kind == Op::kBackwardP2) {
    return earlier && stage(a) == stage(b) && (op(b) == Op::kBackwardP2 || (b_fused && op(b) == Op::kBackwardP1));
  }
  // The way of a unit: through the F of all stages, then back through their I. W follows its I.
  const auto way = [&](int task) { return op(task) == Op::kForward ? stage(task) : 2 * stages() - 1 - stage(task); };
  const bool same_way_counts = earlier || op(b) == Op::kBackwardP2;
  return same_way_counts ? way(a) <= way(b) : way(a) < way(b);
}

bool PipelineProblem::fits(const TaskOrder& order) const {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (!capped(rank)) continue;
    double held = 0;
    for (const int task : order.ranks[rank]) {
      const bool fused = order.fused[slot(task)] != 0;
      if (held + peak(task, fused) > cap(rank)) return false;
      held += bytes(task, fused);
    }
  }
  return true;
}

Schedule PipelineProblem::to_schedule(const TaskOrder& order, P2Policy policy) const {
  Schedule schedule;
  schedule.name = "auto";
  schedule.policy = policy;
  schedule.stages = stages();
  schedule.micro_batches = units_;
  schedule.slices = slices_;
  schedule.rank_of_stage = rank_of_stage_;
  schedule.ranks.resize(ranks());
  for (int rank = 0; rank < ranks(); ++rank) {
    schedule.ranks[rank].reserve(order.ranks[rank].size());
    for (const int task : order.ranks[rank]) {
      const bool fused = op(task) == Op::kBackwardP1 && order.fused[slot(task)] != 0;
      schedule.ranks[rank].push_back({fused ? Op::kBackward : op(task), stage(task), unit(task)});
    }
  }
  schedule = add_communication(std::move(schedule));
  validate(schedule);
  return schedule;
}

TaskOrder PipelineProblem::from_simulation(const Simulation& simulation) const {
  TaskOrder order;
  order.fused.assign(static_cast<size_t>(stages()) * units_, 0);
  order.ranks.resize(ranks());
  std::vector<int> next(static_cast<size_t>(3) * stages(), 0);
  std::vector<char> seen(static_cast<size_t>(tasks()), 0);
  for (int rank = 0; rank < ranks(); ++rank) {
    auto& list = order.ranks[rank];
    // From the end, so that the last piece of a W is met first.
    const auto& timeline = simulation.ranks[rank].timeline;
    for (auto it = timeline.rbegin(); it != timeline.rend(); ++it) {
      if (it->op == Op::kBackwardP1 && it->part > 0) continue;  // its own W may stand before it
      const int id = task(it->op, it->stage, unit_at(it->op, it->micro_batch));
      if (seen[id]) continue;
      seen[id] = 1;
      // A stage without W has none in its timeline, but needs one in a schedule, right after its I.
      if (it->op == Op::kBackwardP1) {
        const int w = task(Op::kBackwardP2, it->stage, place(id));
        if (!seen[w]) list.push_back(w);
        seen[w] = 1;
      }
      list.push_back(id);
    }
    std::reverse(list.begin(), list.end());
    for (const int id : list) {
      if (place(id) != next[id / units_]++) return {};
    }
  }
  return order;
}

}  // namespace twobp
