#include "apps/plan_schedule.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/check/rendezvous.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/draw/svg.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/schedule/text/csv.h"
#include "twobp/schedule/text/lower.h"
#include "twobp/trace/simulated.h"
#include "twobp/trace/timeline.h"

namespace twobp {
namespace {

// The numbers of ranks and stages that the options give.
struct Shape {
  int ranks = 0;
  int stages = 0;
};

Shape shape_of(const PlanOptions& options, const ScheduleSource& source) {
  Shape shape;
  if (!options.ranks.empty()) shape.ranks = parse_count("--ranks", options.ranks);
  if (!options.stages.empty()) {
    shape.stages = parse_count("--stages", options.stages);
  } else if (source.written() == nullptr && shape.ranks == 0) {
    shape.stages = 4;
  }
  const std::vector<int> placed = source.rank_of_stage(shape.stages, shape.ranks);
  return {*std::max_element(placed.begin(), placed.end()) + 1, static_cast<int>(placed.size())};
}

// Messages must have bytes to take time, but bytes count under a cap. So they have almost none, and the speed
// of the link is chosen to give the time.
constexpr double kByteOfMessages = 0x1p-40;

std::vector<StageCost> given_costs(const PlanOptions& options, int stages) {
  const auto messages = parse_costs("--message-seconds", options.message_seconds, stages);
  const auto gradients = parse_costs("--gradient-seconds", options.gradient_seconds, stages);
  const auto forward = parse_costs("--forward", options.forward, stages);
  const auto p1 = parse_costs("--backward-p1", options.backward_p1, stages);
  const auto p2 = parse_costs("--backward-p2", options.backward_p2, stages);
  std::vector<StageCost> costs(stages);
  for (int stage = 0; stage < stages; ++stage) {
    costs[stage].forward = forward[stage];
    costs[stage].backward_p1 = p1[stage];
    costs[stage].backward_p2 = p2[stage];
    costs[stage].p2_units = options.p2_units;
    costs[stage].output_bytes = costs[stage].input_gradient_bytes = messages[stage] * kByteOfMessages;
    costs[stage].gradient_bytes = gradients[stage];
  }
  return costs;
}

SimulationOptions simulation_of(const PlanOptions& options, const Schedule& schedule) {
  SimulationOptions simulation;
  const double latency = std::max(0.0, options.latency);
  if (options.cap > 0) simulation.cap_per_rank.assign(schedule.ranks.size(), options.cap);
  if (options.share_links > 0) {
    simulation.shared_links =
        node_links(schedule.rank_count(), options.share_links, latency, kByteOfMessages);
  } else {
    simulation.message_seconds = latency;
    simulation.bytes_per_second = kByteOfMessages;
  }
  if (!options.data_parallel.empty()) {
    const int replicas = parse_count("--data-parallel", options.data_parallel);
    simulation.data_parallel = {replicas, latency, 1, true};
  }
  return simulation;
}

SimulatedPlan make_plan(const PlanOptions& options, const ScheduleSource& source, const Shape& shape,
                        int micro_batches, P2Policy policy, const std::vector<StageCost>& costs) {
  SimulatedPlan plan{source.make(shape.stages, shape.ranks, micro_batches, policy), {}};
  if (options.order_for_rendezvous) plan.schedule = order_for_rendezvous(std::move(plan.schedule));
  plan.simulation = simulate(plan.schedule, costs, simulation_of(options, plan.schedule));
  return plan;
}

void write_timeline(const std::vector<const SimulatedPlan*>& plans, const std::vector<StageCost>& costs,
                    const std::string& path) {
  const Schedule& schedule = plans[0]->schedule;
  Trace trace;
  trace.simulated = true;
  trace.title =
      concat(schedule.name, ", ", schedule.stages, " stages, ", schedule.micro_batches, " micro-batches");
  for (const SimulatedPlan* plan : plans) {
    trace.step_names.push_back(concat("p2 ", policy_name(plan->schedule.policy)));
    trace.steps.push_back(simulated_step(plan->schedule, costs, plan->simulation));
  }
  write_trace_file(path, timeline_html(trace));
}

// Writes the simulated order: W is where there is time for it (fill) or a need (a cap).
void write_csv(const SimulatedPlan& plan, const PlanOptions& options) {
  const bool simulated = plan.schedule.fills() || options.cap > 0 || !options.memory.empty();
  write_output("--csv", options.csv,
               to_csv(simulated ? lower(plan.schedule, plan.simulation) : plan.schedule,
                      parse_csv_form(options.csv_form)));
}

void write_svg(const SimulatedPlan& plan, const PlanOptions& options) {
  SvgOptions picture;
  picture.until = options.svg_end;
  picture.title = concat(plan.schedule.name, " with p2 ", policy_name(plan.schedule.policy), ", ",
                         plan.schedule.rank_count(), " ranks, ", plan.schedule.stages, " stages, ",
                         plan.schedule.micro_batches, " micro-batches");
  write_output("--svg", options.svg, draw_svg(plan.schedule, plan.simulation, picture));
}

}  // namespace

void write_pictures(const std::vector<const SimulatedPlan*>& plans, const std::vector<StageCost>& costs,
                    const PlanOptions& options) {
  if (!options.csv.empty()) write_csv(*plans[0], options);
  if (!options.svg.empty()) write_svg(*plans[0], options);
  if (!options.timeline.empty()) write_timeline(plans, costs, options.timeline);
}

void plan_schedule(const PlanOptions& options) {
  const ScheduleSource source(options.schedule.empty() ? "1f1b" : options.schedule);
  const Shape shape = shape_of(options, source);
  const P2Policy policy = options.p2.empty() ? source.default_policy() : parse_policy(options.p2);
  const int micro_batches = options.micro_batches.empty()
                                ? source.default_micro_batches(shape.stages, shape.ranks)
                                : parse_count("--micro-batches", options.micro_batches);
  const auto costs = given_costs(options, shape.stages);
  const SimulatedPlan plan = make_plan(options, source, shape, micro_batches, policy, costs);
  validate(plan.schedule, {.sends = options.rendezvous ? Sends::kRendezvous : Sends::kBuffered,
                           .buffer_limit = options.buffers});
  std::vector<const SimulatedPlan*> plans = {&plan};
  SimulatedPlan standard;
  if (policy != P2Policy::kOff) {
    standard = make_plan(options, source, shape, micro_batches, P2Policy::kOff, costs);
    plans.push_back(&standard);
  }
  print_plans(plans, costs, options);
  if (!options.json.empty()) write_plans(plans, options);
  write_pictures(plans, costs, options);
}

}  // namespace twobp
