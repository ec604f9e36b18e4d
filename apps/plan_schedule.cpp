// `twobp plan` without a configuration: simulates schedules with costs from the options.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iostream>
#include <numeric>
#include <set>
#include <system_error>
#include <utility>

#include "apps/plan.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/draw/svg.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp {
namespace {

// This is a schedule and a policy to compare.
struct Asked {
  ScheduleSource source;
  P2Policy policy = P2Policy::kFill;
};

// Returns the entries of --schedule, each with all policies of --p2, or with the one after its "@".
std::vector<Asked> asked_of(const PlanOptions& options) {
  std::vector<Asked> all;
  const auto policies = options.p2.empty() ? std::vector<std::string>{} : parse_names("--p2", options.p2);
  const std::string names = options.schedule.empty() ? "1f1b" : options.schedule;
  for (const std::string& name : parse_names("--schedule", names)) {
    const auto [source, own] = AskedSchedule(name);
    if (own || policies.empty()) {
      all.push_back({source, own.value_or(source.default_policy())});
    } else {
      for (const std::string& policy : policies) all.push_back({source, parse_policy(policy)});
    }
  }
  return all;
}

// Returns the numbers of ranks and stages that the options give.
struct Shape {
  int ranks = 0;
  int stages = 0;
};

// Without numbers, a single schedule has 4 stages, and several have 4 ranks each.
Shape shape_of(const PlanOptions& options, const ScheduleSource& source, bool several) {
  Shape shape;
  if (!options.ranks.empty()) shape.ranks = parse_count("--ranks", options.ranks);
  if (!options.stages.empty()) {
    shape.stages = parse_count("--stages", options.stages);
  } else if (source.written() == nullptr && shape.ranks == 0) {
    (several ? shape.ranks : shape.stages) = 4;
  }
  const std::vector<int> placed = source.rank_of_stage(shape.stages, shape.ranks);
  return {*std::max_element(placed.begin(), placed.end()) + 1, static_cast<int>(placed.size())};
}

// Messages must have bytes to take time, but bytes count under a cap. So messages have almost no bytes, and
// the speed of the link is chosen to give the time.
constexpr double kByteOfMessages = 0x1p-40;

// Holds the costs of the model's `parts`. A stage has the costs of an equal number of parts.
class GivenCosts {
 public:
  GivenCosts(const PlanOptions& options, int parts)
      : parts_(parts),
        p2_units_(options.p2_units),
        messages_(parse_costs("--message-seconds", options.message_seconds, parts)),
        gradients_(parse_costs("--gradient-seconds", options.gradient_seconds, parts)),
        forward_(parse_costs("--forward", options.forward, parts)),
        p1_(parse_costs("--backward-p1", options.backward_p1, parts)),
        p2_(parse_costs("--backward-p2", options.backward_p2, parts)) {}

  std::vector<StageCost> of(int stages) const {
    TWOBP_CHECK(parts_ % stages == 0, "the costs are those of ", parts_,
                " parts of a model, because a compared schedule has that many stages, but ", parts_,
                " is not divisible by ", stages, " stages: give --ranks or --stages");
    const int each = parts_ / stages;
    std::vector<StageCost> costs(stages);
    for (int stage = 0; stage < stages; ++stage) {
      StageCost& cost = costs[stage];
      const auto sum = [&](const std::vector<double>& values) {
        return std::accumulate(values.begin() + stage * each, values.begin() + (stage + 1) * each, 0.0);
      };
      cost.forward = sum(forward_);
      cost.backward_p1 = sum(p1_);
      cost.backward_p2 = sum(p2_);
      cost.p2_units = p2_units_ * each;
      cost.activation_bytes = cost.stash_bytes = each;
      cost.output_bytes = messages_[(stage + 1) * each - 1] * kByteOfMessages;
      cost.input_gradient_bytes = messages_[stage * each] * kByteOfMessages;
      cost.gradient_bytes = sum(gradients_);
    }
    return costs;
  }

 private:
  int parts_;
  int p2_units_;
  std::vector<double> messages_, gradients_, forward_, p1_, p2_;
};

// Returns the largest number of micro-batches of a part that a rank may hold, or 0 without a limit.
double cap_of(const PlanOptions& options) {
  if (options.memory.empty()) return 0;
  double cap = 0;
  const char* end = options.memory.data() + options.memory.size();
  const auto [rest, error] = std::from_chars(options.memory.data(), end, cap);
  TWOBP_CHECK(error == std::errc() && rest == end && std::isfinite(cap) && cap > 0, "--memory is '", options.memory,
              "': without a configuration or --costs, give the number of micro-batches that a rank may hold");
  return cap;
}

SimulationOptions simulation_of(const PlanOptions& options, const Schedule& schedule) {
  SimulationOptions simulation;
  const double latency = std::max(0.0, options.latency);
  if (const double cap = cap_of(options); cap > 0) simulation.cap_per_rank.assign(schedule.ranks.size(), cap);
  if (options.share_links > 0) {
    simulation.shared_links = node_links(schedule.rank_count(), options.share_links, latency, kByteOfMessages);
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

int slices_of(const PlanOptions& options) {
  return options.slices.empty() ? 1 : parse_count("--slices", options.slices);
}

// This is a combination with its plan and its costs.
struct Planned {
  Asked asked;
  Shape shape;
  std::vector<StageCost> costs;
  SimulatedPlan plan;
};

SimulatedPlan simulated(Schedule schedule, const std::vector<StageCost>& costs, const PlanOptions& options) {
  const SimulationOptions simulation = simulation_of(options, schedule);
  SimulatedPlan plan{std::move(schedule), {}, 0};
  plan.simulation = simulate(plan.schedule, costs, simulation);
  plan.bound = bound_of(plan.schedule, costs, simulation);
  return plan;
}

SimulatedPlan make_plan(const PlanOptions& options, const Planned& of, P2Policy policy, int micro_batches) {
  return simulated(of.asked.source.make(of.shape.stages, of.shape.ranks, micro_batches, policy, slices_of(options)),
                   of.costs, options);
}

// Returns the costs of one of the equal slices of a micro-batch.
std::vector<StageCost> of_a_slice(std::vector<StageCost> costs, int slices) {
  for (StageCost& cost : costs) {
    for (double StageCost::*of :
         {&StageCost::forward, &StageCost::backward_p1, &StageCost::backward_p2, &StageCost::activation_bytes,
          &StageCost::stash_bytes, &StageCost::output_bytes, &StageCost::input_gradient_bytes}) {
      cost.*of /= slices;
    }
  }
  return costs;
}

// Writes the simulated order. W runs where there is time (fill) or where memory is needed (a cap).
void write_csv(const SimulatedPlan& plan, const PlanOptions& options) {
  const bool as_simulated = plan.schedule.fills() || !options.memory.empty();
  write_output("--csv", options.csv, to_csv(as_simulated ? lower(plan.schedule, plan.simulation) : plan.schedule));
}

void write_svg(const SimulatedPlan& plan, const PlanOptions& options) {
  SvgOptions picture;
  picture.until = options.svg_end;
  picture.title =
      concat(plan.schedule.name, " with p2 ", policy_name(plan.schedule.policy), ", ", plan.schedule.rank_count(),
             " ranks, ", plan.schedule.stages, " stages, ", plan.schedule.count_text());
  write_output("--svg", options.svg, draw_svg(plan.schedule, plan.simulation, picture));
}

// Leaves out the plans that do not fit into the cap, and says so.
void keep_what_fits(std::vector<Planned>& all, double cap) {
  if (cap <= 0) return;
  std::vector<Planned> fit;
  double least = 0;
  for (Planned& each : all) {
    const double needs = peak_of(each.plan.simulation);
    if (fits(each.plan.simulation, cap)) {
      fit.push_back(std::move(each));
      continue;
    }
    least = least > 0 ? std::min(least, needs) : needs;
    std::cout << each.plan.schedule.name << " with p2 " << policy_name(each.plan.schedule.policy)
              << " does not fit: a rank holds " << number(needs) << " micro-batches\n";
  }
  TWOBP_CHECK(!fit.empty(), "no schedule fits into ", number(cap), " micro-batches per rank; the smallest needs ",
              number(least), ": raise --memory");
  all = std::move(fit);
}

// Searches a schedule for each placement in `named`, with its micro-batches. The name "auto (NAME)" means
// that a named schedule was the best.
std::vector<Planned> searched(const std::vector<Planned>& named, const PlanOptions& options) {
  std::vector<Planned> found;
  std::set<std::vector<int>> known;
  for (const Planned& each : named) {
    const Schedule& schedule = each.plan.schedule;
    if (!known.insert(schedule.rank_of_stage).second) continue;
    AutoSchedule best;
    try {
      best = auto_schedule(schedule.rank_of_stage, schedule.micro_batches / schedule.slices, each.costs,
                           simulation_of(options, schedule), {.slices = schedule.slices});
    } catch (const NoScheduleFits&) {
      continue;
    }
    Planned planned{each.asked, each.shape, each.costs, {}};
    if (best.method == "named") best.schedule.name = concat("auto (", best.schedule.name, ")");
    planned.plan = simulated(std::move(best.schedule), planned.costs, options);
    found.push_back(std::move(planned));
  }
  return found;
}

void compare_schedules(const PlanOptions& options, std::vector<Planned> all) {
  if (options.search) {
    for (Planned& each : searched(all, options)) all.push_back(std::move(each));
  }
  keep_what_fits(all, cap_of(options));
  std::stable_sort(all.begin(), all.end(), [](const Planned& a, const Planned& b) {
    return a.plan.simulation.step_seconds < b.plan.simulation.step_seconds;
  });
  std::vector<const SimulatedPlan*> plans;
  for (const Planned& each : all) plans.push_back(&each.plan);
  print_comparison(plans);
  if (!options.json.empty()) write_plans(plans, options);
  write_pictures(*plans[0], options);
}

}  // namespace

double bound_of(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options) {
  constexpr double kMostOps = 3e5;
  if (schedule.allow_reorder || 3.0 * schedule.stages * schedule.micro_batches > kMostOps) return kUnknown;
  // The bound counts I and W of every stage, in one step.
  if (schedule.frozen > 0 || !schedule.has_backward()) return kUnknown;
  try {
    return lower_bound(schedule.rank_of_stage, schedule.micro_batches / schedule.slices, costs, options,
                       schedule.slices);
  } catch (const NoScheduleFits&) {
    return kUnknown;
  }
}

void write_pictures(const SimulatedPlan& plan, const PlanOptions& options) {
  if (!options.csv.empty()) write_csv(plan, options);
  if (!options.svg.empty()) write_svg(plan, options);
}

void plan_schedule(const PlanOptions& options) {
  std::vector<Planned> all;
  const std::vector<Asked> asked = asked_of(options);
  const bool compares = asked.size() > 1 || options.search;
  int parts = 1;
  int micro_batches = options.micro_batches.empty() ? 0 : parse_count("--micro-batches", options.micro_batches);
  const bool own_number = micro_batches == 0;
  for (const Asked& each : asked) {
    const Shape shape = shape_of(options, each.source, asked.size() > 1);
    parts = std::max(parts, shape.stages);
    if (own_number) {
      micro_batches = std::max(micro_batches, each.source.default_micro_batches(shape.stages, shape.ranks));
    }
    all.push_back({each, shape, {}, {}});
  }
  const GivenCosts given(options, parts);
  for (Planned& each : all) {
    each.costs = of_a_slice(given.of(each.shape.stages), slices_of(options));
    each.plan = make_plan(options, each, each.asked.policy, micro_batches);
    validate(each.plan.schedule);
  }
  if (compares) return compare_schedules(options, std::move(all));
  const Planned& one = all.front();
  std::vector<const SimulatedPlan*> plans = {&one.plan};
  SimulatedPlan standard;
  if (one.asked.policy != P2Policy::kOff) {
    standard = make_plan(options, one, P2Policy::kOff, micro_batches);
    plans.push_back(&standard);
  }
  print_plans(plans, one.costs, options);
  if (!fits(one.plan.simulation, cap_of(options)))
    std::cout << "\nIt does not fit: a rank holds " << number(peak_of(one.plan.simulation)) << " micro-batches\n";
  if (!options.json.empty()) write_plans(plans, options);
  write_pictures(one.plan, options);
}

}  // namespace twobp
