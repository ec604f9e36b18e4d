// A pipeline's plans: schedules, the memory that they may use, and where W runs on devices.
#include <algorithm>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/stage.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/transport/collectives.h"

namespace twobp {

StepPlan Pipeline::plan(const ScheduleSource& schedule, int micro_batches, P2Policy policy,
                        const StepOptions& options) const {
  if (micro_batches == 0) return forward_plan(0);
  const auto make = [&](const ScheduleSource& source, P2Policy policy) {
    return source.make(stages(), ranks(), micro_batches, policy, slices(), frozen_stages_);
  };
  Schedule standard = make(schedule, P2Policy::kOff);
  TWOBP_CHECK(standard.has_backward(), "schedule '", schedule.name(),
              "' has no backward pass, so it trains nothing: use another schedule");
  if (options.standard) standard = make(*options.standard, P2Policy::kOff);
  return plan(make(schedule, policy), options, std::make_shared<const Schedule>(std::move(standard)));
}

StepPlan Pipeline::plan(Schedule schedule, const StepOptions& options, std::shared_ptr<const Schedule> standard) const {
  TWOBP_CHECK(standard || !options.memory_cap.is_automatic(), "an automatic cap needs a schedule with p2 off");
  TWOBP_CHECK(!streams_gradients() || !schedule.has(Op::kBackward) || !schedule.has(Op::kBackwardP2),
              "gradients are streamed, but schedule '", schedule.name, "' with p2 ", policy_name(schedule.policy),
              " has whole backward passes (B) before W of earlier micro-batches, which would change the order of sums: "
              "set pipeline.p2 to \"fill\", or pipeline.gradients to \"kept\"");
  StepPlan plan;
  plan.schedule = std::move(schedule);
  plan.options = options;
  plan.standard = std::move(standard);
  plan.leading = leading_forwards(plan.schedule);
  plan.streams = streams_;
  add_caps(plan);
  return plan;
}

SimulationOptions simulation_of(const StepPlan& plan) {
  SimulationOptions options = in_process_simulation(plan.caps);
  options.streams = plan.streams;
  options.ahead = plan.ahead;
  return options;
}

StepPlan Pipeline::forward_plan(int micro_batches) const {
  StepOptions options;
  options.memory_cap = MemoryCap::none();
  if (micro_batches > 0) return plan(make_forward_schedule(rank_of_stage_, micro_batches), options);
  Schedule none;  // the last batch of an epoch may leave a replica nothing
  none.name = "none";
  none.stages = stages();
  none.micro_batches = 0;
  none.rank_of_stage = rank_of_stage_;
  none.ranks.resize(ranks());
  return plan(std::move(none), options);
}

namespace {

// The bytes of F of a stage for the next step: those of one layer, and the outputs of `count` micro-batches.
int64_t room_ahead(const std::vector<LayerCost>& stage, int count) {
  double most = 0;
  for (const LayerCost& layer : stage) most = std::max({most, layer.forward_peak, layer.forward_held});
  return static_cast<int64_t>(most + count * stage.back().output);
}

}  // namespace

void Pipeline::add_caps(StepPlan& plan) const {
  const StepOptions& options = plan.options;
  const MemoryCap& cap = options.memory_cap;
  const StagesOfLayers costs = layer_costs(largest_);
  plan.largest = largest_;
  plan.largest_w.assign(ranks(), 0);
  for (size_t i = 0; i < costs.size(); ++i) {
    double& most = plan.largest_w[rank_of_stage_[i % split_.size()]];
    for (const LayerCost& cost : costs[i]) most = std::max(most, cost.p2_peak);
  }
  if (plan.standard) plan.standard_peaks = twobp::standard_peaks(*plan.standard, profiled_costs(costs));
  if (cap.is_automatic()) {
    plan.fixed = fixed_bytes();
    plan.caps = automatic_caps(plan, costs);
  } else {
    plan.caps.assign(ranks(), cap.bytes());
  }
  const Schedule& schedule = plan.schedule;
  // If the policy does not ask for filling, W that is to be concatenated stays together.
  const bool fills = schedule.fills() || (schedule.holds_p2_back() && options.batching == P2Batching::kLoop &&
                                          twobp::fills_waits(schedule, profiled_costs(costs), simulation_of(plan)));
  const bool on_devices = world_.device(world_.local_ranks().front()).asynchronous();
  plan.fills_waits = fills && !on_devices;
  const std::vector<int64_t> caps = plan.caps;
  if (schedule.frozen > 0 && cap.is_automatic()) plan.caps[rank_of_stage_[0]] += room_ahead(costs[0], ranks());
  plan.ahead = forwards_ahead(plan);
  if (plan.ahead == 0) plan.caps = caps;
  if (!fills || !on_devices) return;
  // The places come from the profile and the caps, which all processes have, so all find the same.
  SimulationOptions placing = simulation_of(plan);
  placing.p2_order = options.p2_order;
  placing.data_parallel.replicas = world_.replicas;  // bucket order goes by it
  placing.timeline = true;
  plan.w_places = p2_places(schedule, simulate(schedule, profiled_costs(costs), placing));
}

int Pipeline::forwards_ahead(const StepPlan& plan) const {
  if (plan.schedule.frozen == 0 || !plan.fills_waits || graphs_ || !experts_.empty()) return 0;
  const int layers = std::accumulate(split_.begin(), split_.begin() + plan.schedule.frozen, 0);
  for (int layer = 0; layer < layers; ++layer) {
    const auto made = model_.layers[layer].make();  // allocates nothing
    // F that runs in vain must change nothing, and count nothing.
    if (std::ranges::any_of(parameters_of(*made), &Parameter::is_buffer)) return 0;
    if (std::ranges::count(expert_layers_, layer, &std::pair<int, ExpertTokens>::first) > 0) return 0;
  }
  const int most = world_.all_local ? ranks() : 1;  // between processes, messages would cross the end of a step
  return twobp::forwards_ahead(plan.schedule, profiled_costs(layer_costs(largest_)), simulation_of(plan), most);
}

// Streamed gradients belong to what standard backpropagation needs, but are not held.
std::vector<int64_t> Pipeline::automatic_caps(const StepPlan& plan, const StagesOfLayers& costs) const {
  std::vector<int64_t> kept = plan.fixed;
  std::vector<int64_t> saved(kept.size(), 0);
  std::vector<int64_t> largest(kept.size(), 0);
  for (size_t stage = 0; stage < plan.streams.size(); ++stage) {
    if (!plan.streams[stage]) continue;
    const auto rank = static_cast<size_t>(rank_of_stage_[stage]);
    const StreamedBytes bytes = streamed_bytes(costs[stage]);
    saved[rank] += static_cast<int64_t>(bytes.freed);
    largest[rank] = std::max(largest[rank], static_cast<int64_t>(bytes.most));
  }
  for (size_t rank = 0; rank < kept.size(); ++rank) kept[rank] += saved[rank];
  std::vector<int64_t> caps = auto_caps(plan.standard_peaks, kept, plan.options.memory_cap.times());
  for (size_t rank = 0; rank < caps.size(); ++rank) caps[rank] += saved[rank] - largest[rank];
  return caps;
}

void Pipeline::stream_gradients(const std::vector<bool>& stages) {
  const std::set<std::string> tied = tied_weights(model_);
  streams_ = stages;
  known_fixed_.clear();
  renewed_.clear();
  on_ranks([&](int rank) {
    for (const auto& stage : this->rank(rank).stages()) {
      if (stages.empty() || !stages[static_cast<size_t>(stage->index())]) continue;
      for (int i = 0; i < stage->layer_count(); ++i) {
        for (Parameter* parameter : stage->parameters(i)) {
          if (!tied.contains(parameter->name())) parameter->stream_grad();
        }
      }
    }
  });
}

namespace {

// The messages from one rank to another, one a row: the operation, stage and micro-batch of its receive.
at::Tensor order_of(const Schedule& schedule, int from, int to) {
  std::vector<int64_t> rows;
  for (const auto& [receive, sent_at] : messages_between(schedule, from, to))
    rows.insert(rows.end(), {static_cast<int64_t>(receive.op), receive.stage, receive.micro_batch});
  return at::tensor(rows, at::kLong).view({-1, 3});
}

std::string name_of_row(const at::Tensor& order, int64_t row, const Schedule& schedule) {
  if (row >= order.size(0)) return "none";
  const auto* numbers = order.const_data_ptr<int64_t>() + 3 * row;
  const Instruction receive{static_cast<Op>(numbers[0]), static_cast<int>(numbers[1]), static_cast<int>(numbers[2])};
  return to_string(receive, schedule.slices);
}

// A transport may know messages by their order alone.
void agree_on_order(Transport& transport, const Schedule& schedule, double timeout) {
  const int rank = transport.rank();
  const Tag tag{.kind = MessageKind::kOrder};
  for (int to = 0; to < transport.size(); ++to) {
    const at::Tensor order = order_of(schedule, rank, to);
    if (order.size(0) > 0) transport.isend(to, tag, {order});
  }
  for (int from = 0; from < transport.size(); ++from) {
    const at::Tensor mine = order_of(schedule, from, rank);
    if (mine.size(0) == 0) continue;
    const at::Tensor theirs = transport.receive(from, tag, timeout).at(0).cpu();
    if (theirs.equal(mine)) continue;
    TWOBP_CHECK(theirs.dim() == 2 && theirs.size(1) == 3 && theirs.scalar_type() == at::kLong, "rank ", from,
                " sent a list of messages that makes no sense to rank ", rank);
    const auto same = [&](int64_t row) {
      return row < mine.size(0) && row < theirs.size(0) && theirs[row].equal(mine[row]);
    };
    int64_t row = 0;
    while (same(row)) ++row;
    fail("rank ", rank, " expects from rank ", from, " message ", row + 1, " of a step to be ",
         name_of_row(mine, row, schedule), ", but that rank sends ", name_of_row(theirs, row, schedule),
         ": do both run the same schedule?");
  }
}

}  // namespace

void Pipeline::agree_on_messages(const Schedule& schedule) {
  if (world_.processes_of_replica() < 2 || !schedule.has_backward()) return;
  on_ranks([&](int rank) { agree_on_order(*world_.pipeline[rank], schedule, timeout_); });
}

std::shared_ptr<const StepPlan> Pipeline::renewed(const StepPlan& plan) {
  const auto is_same = [&](const auto& kept) {
    return kept->options == plan.options && kept->schedule == plan.schedule;
  };
  auto kept = std::ranges::find_if(renewed_, is_same);
  if (kept == renewed_.end()) {
    const auto compared = [&](const auto& other) { return other->schedule == plan.schedule; };
    if (std::ranges::none_of(renewed_, compared)) agree_on_messages(plan.schedule);
    kept = renewed_.insert(renewed_.end(), std::make_shared<const StepPlan>(plan));
  }
  if ((*kept)->largest != largest_ || (!plan.fixed.empty() && (*kept)->fixed != fixed_bytes())) {
    StepPlan now = plan;
    add_caps(now);
    *kept = std::make_shared<const StepPlan>(std::move(now));
  }
  return *kept;
}

std::vector<int64_t> Pipeline::fixed_bytes() const {
  if (!known_fixed_.empty()) return known_fixed_;
  at::Tensor fixed = at::zeros({world_.replicas, ranks()}, at::kLong);
  for (const int rank : world_.local_ranks()) {
    const MemoryUse use = meter_->rank_use(rank);
    fixed[world_.replica].mutable_data_ptr<int64_t>()[rank] = use.total() - use.held();
  }
  const bool together = world_.processes->size() > 1;
  if (together) sum_on_the_way(*world_.processes, fixed, timeout_);
  // The highest of any replica, so that all plan alike: replicas may hold different shards of the optimizer.
  const at::Tensor most = std::get<0>(fixed.max(0));
  const int64_t* values = most.const_data_ptr<int64_t>();
  std::vector<int64_t> bytes(values, values + ranks());
  if (together) known_fixed_ = bytes;
  return bytes;
}

std::vector<std::string> batching_names() {
  return {"loop", "concat"};
}

std::string_view batching_name(P2Batching batching) {
  static const std::vector<std::string> names = batching_names();
  return names[static_cast<size_t>(batching)];
}

P2Batching parse_batching(std::string_view name) {
  return static_cast<P2Batching>(index_of_name("p2 batching", name, batching_names()));
}

}  // namespace twobp
