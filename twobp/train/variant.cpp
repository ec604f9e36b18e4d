#include "twobp/train/variant.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/stage.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/plan/planner.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/world.h"

namespace twobp {

bool reorders(const Variant& variant) {
  const Schedule* written = variant.schedule.written();  // named schedules never reorder
  return written != nullptr && written->allow_reorder;
}

StepPlan make_plan(const Pipeline& pipeline, const Variant& variant, int micro_batches, P2Order p2_order) {
  return pipeline.plan(variant.schedule, micro_batches, variant.policy,
                       {variant.batching, variant.memory_cap, p2_order, variant.standard});
}

std::string warning_of_cap(const Pipeline& pipeline, const Variant& variant, int micro_batches) {
  if (variant.memory_cap.is_automatic() || variant.memory_cap.bytes() == 0) return "";
  const StepPlan plan = make_plan(pipeline, variant, micro_batches);
  const SimulationOptions options = simulation_of(plan);
  const std::vector<StageCost> costs = profiled_costs(pipeline.layer_costs());
  const auto exceeds = [&](const RankSimulation& rank) { return rank.peak_bytes > variant.memory_cap.bytes(); };
  if (std::ranges::none_of(simulate(plan.schedule, costs, options).ranks, exceeds)) return "";
  const std::vector<double> caps = smallest_caps(plan.schedule, costs, options);
  const int64_t least = std::llround(*std::max_element(caps.begin(), caps.end()));
  if (least <= variant.memory_cap.bytes()) return "";
  return concat("pipeline.memory_cap is ", variant.memory_cap.bytes(), " bytes, but the fullest rank of ",
                variant.schedule.name(), " needs ", least,
                " for activations and stash, so the run exceeds the cap: raise the cap to that, or find a "
                "schedule that needs less with pipeline.schedule = \"auto\" or 'twobp plan --memory'");
}

RunAhead decide_run_ahead(const Config& config, Pipeline& pipeline, const StepPlan& plan, bool ties_ranks,
                          const std::vector<double>& batch) {
  RunAhead decision;
  if (config.pipeline.run_ahead == "off" || pipeline.ranks() == 1) return decision;
  const bool needs_norm = config.train.clip_norm > 0 || config.train.precision == "fp16";
  // Replicas that share the optimizer's state exchange weights at the end of every step.
  const bool shards = config.optimizer.shard && config.pipeline.data_parallel > 1;
  if (!ties_ranks && !(needs_norm && shards)) {
    const NormNeed norm = needs_norm ? NormNeed::kAfterForwards : NormNeed::kNone;
    decision.gain =
        step_periods(plan.schedule, profiled_costs(pipeline.layer_costs(), batch), simulation_of(plan), norm).gain();
  }
  decision.on = config.pipeline.run_ahead == "on" || (!config.pipeline.graphs && decision.gain > RunAhead::kLeastGain);
  World& world = pipeline.world();
  if (world.processes->size() > 1) {
    at::Tensor first = at::zeros({2}, at::kDouble);
    auto* values = first.mutable_data_ptr<double>();
    values[0] = decision.on ? 1 : 0;
    values[1] = decision.gain;
    broadcast(*world.processes, first, 0, config.pipeline.timeout);
    decision.on = first.const_data_ptr<double>()[0] > 0;
    decision.gain = first.const_data_ptr<double>()[1];
  }
  decision.presumes = decision.on && needs_norm && !shards;
  return decision;
}

std::string to_text(const RunAhead& run_ahead) {
  const std::string gain = fixed(run_ahead.gain, 2);
  return run_ahead.on
             ? concat("ranks begin the next step without waiting for each other (simulated: ", gain, "x as fast)")
             : concat("ranks wait for each other at the end of a step (simulated: ", gain,
                      "x as fast if they did not)");
}

namespace {

std::string describe(const AutoSchedule& found) {
  std::string text = concat("auto (", found.method == "named" ? found.best_named : found.method);
  if (found.named_seconds > 0 && found.method != "named") {
    text += concat(", predicted ", fixed(found.gain(), 3), "x over ", found.best_named);
  }
  return concat(text, ", at most ", fixed(100 * found.gap(), 1), "% above the best possible)");
}

// The named schedule whose memory with p2 off sets the cap of "auto".
const char* standard_name(const Pipeline& pipeline) {
  const Placement placement = possible_placements(pipeline.stages(), pipeline.ranks()).at(0);
  return placement == Placement::kLinear ? "1f1b" : placement == Placement::kV ? "zb-v" : "looped-bfs";
}

}  // namespace

Variant auto_variant(const Pipeline& pipeline, int micro_batches, Variant asked, const std::vector<double>& batch) {
  const StepOptions given{asked.batching, asked.memory_cap};
  const StepPlan standard = pipeline.plan(standard_name(pipeline), micro_batches, P2Policy::kOff, given);
  const SimulationOptions options = in_process_simulation(standard.caps);
  const std::vector<StageCost> costs = profiled_costs(pipeline.layer_costs(), batch);
  AutoScheduleOptions search{.slices = pipeline.slices()};
  if (asked.memory_cap.is_automatic()) {
    // The cap is raised to the memory that the named schedule needs under the same cap if it fills its waits with W.
    const StepPlan filled = pipeline.plan(standard_name(pipeline), micro_batches, P2Policy::kFill, given);
    const Simulation simulation = simulate(filled.schedule, costs, options);
    for (size_t rank = 0; rank < simulation.ranks.size(); ++rank)
      search.most_bytes.push_back(std::max(options.cap_per_rank.at(rank), simulation.ranks[rank].peak_bytes));
  }
  AutoSchedule found;
  try {
    found = auto_schedule(pipeline.rank_of_stage(), micro_batches, costs, options, search);
  } catch (const Error& error) {
    fail("pipeline.schedule 'auto' under pipeline.memory_cap: ", error.what());
  }
  // A source has no messages; `make` adds them. Placed W is part of the source, whatever policy placed it.
  const bool fills = fills_waits(found.schedule, costs, options);
  Schedule schedule = std::move(found.schedule);
  for (auto& list : schedule.ranks) {
    std::erase_if(list, [](const Instruction& instruction) { return !is_compute(instruction.op); });
  }
  const bool off = schedule.policy == P2Policy::kOff;
  asked.policy = off ? P2Policy::kOff : fills ? P2Policy::kFill : P2Policy::kPlaced;
  schedule.policy = asked.policy;
  schedule.name = describe(found);
  asked.schedule = ScheduleSource(std::move(schedule));
  asked.standard = standard_name(pipeline);  // it runs under the cap it was found for
  return asked;
}

constexpr double kLeastGain = 1.02;  // by which other stages must be faster

double simulated_seconds(const ModelSpec& model, const SliceProfiles& slices, const PipelineOptions& options,
                         const Variant& variant, int micro_batches, bool next_known) {
  const std::vector<int>& placed = options.rank_of_stage;
  const std::vector<int> split =
      options.split.empty() ? measured_split(model, layer_costs(model, sum_of(slices)), placed) : options.split;
  const Schedule schedule = variant.schedule.make(options.stages, *std::max_element(placed.begin(), placed.end()) + 1,
                                                  micro_batches, variant.policy, slices.count(), options.frozen_stages);
  const auto costs = profiled_costs(layer_costs_of_stages(model, slices.profiles, split));
  SimulationOptions simulation = in_process_simulation();
  if (next_known) simulation.ahead = forwards_ahead(schedule, costs, simulation, schedule.rank_count());
  return simulate(schedule, costs, simulation).step_seconds;
}

PipelineOptions with_frozen_stages(const PipelineOptions& options, const ModelSpec& model, const SliceProfiles& slices,
                                   const Variant& variant, int micro_batches) {
  constexpr int kMostMoves = 300;
  const int ranks = *std::max_element(options.rank_of_stage.begin(), options.rank_of_stage.end()) + 1;
  const auto layers = static_cast<int>(model.layers.size());
  if (!can_have_frozen_stages(variant.schedule, ranks, options.stages, model.first_trainable, layers)) return options;
  const auto seconds = [&](const PipelineOptions& one, bool next_known) {
    return simulated_seconds(model, slices, one, variant, micro_batches, next_known);
  };
  PipelineOptions with = options;
  const std::vector<LayerCost> costs = layer_costs(model, sum_of(slices));
  const auto place = [&](int begin, int end, const std::vector<int>& rank_of_stage) {
    ModelSpec part;
    part.layers.assign(model.layers.begin() + begin, model.layers.begin() + end);
    for (const int count : measured_split(part, {costs.begin() + begin, costs.begin() + end}, rank_of_stage))
      with.split.push_back(count);
    with.rank_of_stage.insert(with.rank_of_stage.end(), rank_of_stage.begin(), rank_of_stage.end());
  };
  with.rank_of_stage.clear();
  place(0, model.first_trainable, place_stages(Placement::kLinear, ranks, ranks));
  place(model.first_trainable, layers, options.rank_of_stage);
  with.stages += ranks;
  with.frozen_stages = true;
  const auto seconds_of = [&](const std::vector<int>& split) -> std::optional<double> {
    if (std::accumulate(split.begin(), split.begin() + ranks, 0) > model.first_trainable) return std::nullopt;
    PipelineOptions moved = with;
    moved.split = split;
    return seconds(moved, /*next_known=*/true);
  };
  with.split = move_layers(with.split, seconds(with, /*next_known=*/true), kMostMoves, seconds_of);
  const double before = seconds(options, /*next_known=*/false);
  const bool faster = before > kLeastGain * seconds(with, /*next_known=*/true);
  return faster && kLeastGain * before >= seconds(with, /*next_known=*/false) ? with : options;
}

PipelineOptions with_v_for_streaming(const PipelineOptions& options, const ModelSpec& model,
                                     const SliceProfiles& slices, int micro_batches) {
  const int ranks = options.stages;  // one stage on each
  if (ranks == 1 || static_cast<int>(model.layers.size()) < 2 * ranks) return options;
  PipelineOptions with = options;
  with.stages = 2 * ranks;
  with.rank_of_stage = place_stages(Placement::kV, with.stages, ranks);
  const auto seconds = [&](const PipelineOptions& one) {
    const auto split = measured_split(model, layer_costs(model, sum_of(slices)), one.rank_of_stage);
    const auto costs = profiled_costs(layer_costs_of_stages(model, slices.profiles, split));
    SimulationOptions streaming = in_process_simulation();
    streaming.streams.assign(static_cast<size_t>(one.stages), true);
    double least = std::numeric_limits<double>::infinity();
    for (const NamedVariant& named : named_schedules_on(one.rank_of_stage, micro_batches, slices.count())) {
      if (named.policy != P2Policy::kFill) continue;
      const Schedule schedule =
          make_schedule(named.name, one.stages, micro_batches, named.policy, ranks, slices.count());
      least = std::min(least, simulate(schedule, costs, streaming).step_seconds);
    }
    return least;
  };
  return seconds(options) > kLeastGain * seconds(with) ? with : options;
}

}  // namespace twobp
