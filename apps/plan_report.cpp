// Draws simulated schedules and prints their tables and JSON.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <sys/ioctl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "apps/plan.h"
#include "apps/print.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {
namespace {

constexpr double kMostDrawnCells = 20000;  // a larger grid is not drawn

// Returns a part of the step as text. Sums in another order may give 1e-14 instead of 0.
double without_rounding(double seconds, double step) {
  return std::abs(seconds) < 1e-9 * step ? 0 : seconds;
}

// Returns the duration of the shortest op, so that all are drawn to scale.
double grid_unit(const std::vector<StageCost>& costs) {
  double unit = 0;
  for (const auto& cost : costs) {
    for (double op : {cost.forward, cost.backward_p1, cost.backward_p2 / cost.p2_units}) {
      if (op > 0) unit = unit > 0 ? std::min(unit, op) : op;
    }
  }
  return unit > 0 ? unit : 1;
}

// What peak_in_flight counts.
const char* peak_name(const Schedule& schedule) {
  return schedule.slices > 1 ? "peak slices" : "peak micro-batches";
}

void print_ranks(const SimulatedPlan& plan) {
  std::cout << "p2 " << policy_name(plan.schedule.policy) << ": busy and idle time of each rank\n";
  std::vector<std::vector<std::string>> rows = {{"rank", "busy"}};
  for (int cause = 0; cause < kBubbleCauses; ++cause) {
    rows[0].emplace_back(bubble_cause_name(static_cast<BubbleCause>(cause)));
  }
  rows[0].emplace_back("idle");
  rows[0].emplace_back(peak_name(plan.schedule));
  for (int rank = 0; rank < plan.schedule.rank_count(); ++rank) {
    const auto& result = plan.simulation.ranks[rank];
    std::vector<std::string> row = {std::to_string(rank), number(result.busy)};
    for (double idle : result.bubble) row.push_back(number(without_rounding(idle, plan.simulation.step_seconds)));
    row.push_back(percent(plan.simulation.idle_fraction(rank)));
    row.push_back(std::to_string(result.peak_in_flight));
    rows.push_back(std::move(row));
  }
  print_table(rows);
}

int most_in_flight(const Simulation& simulation) {
  int most = 0;
  for (const auto& rank : simulation.ranks) most = std::max(most, rank.peak_in_flight);
  return most;
}

std::string bound_text(const SimulatedPlan& plan) {
  return std::isnan(plan.bound) ? "-" : number(plan.bound);
}

void print_summary(const std::vector<const SimulatedPlan*>& plans) {
  std::vector<std::vector<std::string>> rows(6);
  rows[0] = {""};
  rows[1] = {"step time"};
  rows[2] = {"lower bound"};
  rows[3] = {"bubble ratio"};
  rows[4] = {peak_name(plans.front()->schedule)};
  rows[5] = {"speed-up over off"};
  const double standard = plans.back()->simulation.step_seconds;
  for (const SimulatedPlan* plan : plans) {
    const Simulation& simulation = plan->simulation;
    rows[0].push_back(concat("p2 ", policy_name(plan->schedule.policy)));
    rows[1].push_back(number(simulation.step_seconds));
    rows[2].push_back(bound_text(*plan));
    rows[3].push_back(percent(simulation.bubble_ratio()));
    rows[4].push_back(std::to_string(most_in_flight(simulation)));
    rows[5].push_back(simulation.step_seconds > 0 ? number(standard / simulation.step_seconds) : "-");
  }
  if (plans.size() == 1) rows.pop_back();
  print_table(rows);
}

void print_grid(const SimulatedPlan& plan, double unit) {
  winsize size{};
  const bool terminal = is_terminal(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0;
  const double cells = plan.simulation.step_seconds / unit * plan.schedule.rank_count();
  if (cells > kMostDrawnCells) {
    std::cout << "(the grid is not drawn, because it would have " << number(cells) << " cells)\n";
    return;
  }
  std::cout << draw_grid(plan.schedule, plan.simulation, unit, terminal ? size.ws_col : 0);
}

// Adds each op as it ran, and the instructions.
void add_ops(const SimulatedPlan& plan, int rank, nlohmann::ordered_json& entry) {
  entry["timeline"] = nlohmann::ordered_json::array();
  for (const auto& op : plan.simulation.ranks[rank].timeline) {
    entry["timeline"].push_back({{"op", op_name(op.op)},
                                 {"stage", op.stage},
                                 {"micro_batch", op.micro_batch},
                                 {"begin", op.begin},
                                 {"end", op.end}});
  }
  entry["instructions"] = nlohmann::ordered_json::array();
  for (const Instruction& instruction : plan.schedule.ranks[rank]) {
    entry["instructions"].push_back(to_string(instruction, plan.schedule.slices));
  }
}

nlohmann::ordered_json to_json(const SimulatedPlan& plan, bool ops) {
  nlohmann::ordered_json json;
  const double step = plan.simulation.step_seconds;
  json["schedule"] = plan.schedule.name;
  json["stages"] = plan.schedule.stages;
  json["p2"] = policy_name(plan.schedule.policy);
  json["step_time"] = step;
  json["lower_bound"] = plan.bound;
  json["bubble_ratio"] = plan.simulation.bubble_ratio();
  for (int rank = 0; rank < plan.schedule.rank_count(); ++rank) {
    const auto& result = plan.simulation.ranks[rank];
    nlohmann::ordered_json entry;
    entry["busy"] = result.busy;
    for (int cause = 0; cause < kIdleCauses; ++cause) {
      entry["idle"][std::string(idle_cause_name(static_cast<IdleCause>(cause)))] =
          without_rounding(result.idle[cause], step);
    }
    for (int cause = 0; cause < kBubbleCauses; ++cause) {
      entry["bubble"][std::string(bubble_cause_name(static_cast<BubbleCause>(cause)))] =
          without_rounding(result.bubble[cause], step);
    }
    entry["idle_fraction"] = plan.simulation.idle_fraction(rank);
    entry["peak_micro_batches"] = result.peak_in_flight;
    entry["peak"] = {{"bytes", result.peak_bytes},
                     {"time", result.peak.seconds},
                     {"op", op_name(result.peak.op)},
                     {"stage", result.peak.stage},
                     {"micro_batch", result.peak.micro_batch}};
    if (ops) add_ops(plan, rank, entry);
    json["ranks"].push_back(std::move(entry));
  }
  return json;
}

}  // namespace

void print_comparison(const std::vector<const SimulatedPlan*>& plans) {
  std::vector<std::vector<std::string>> rows = {
      {"schedule", "p2", "ranks", "stages", "M", "step time", "lower bound", "bubble ratio", "peak"}};
  const bool sliced = plans.front()->schedule.slices > 1;  // all have the same number
  if (sliced) rows[0].insert(rows[0].begin() + 5, "slices");
  for (const SimulatedPlan* plan : plans) {
    const Schedule& schedule = plan->schedule;
    rows.push_back({schedule.name, std::string(policy_name(schedule.policy)), std::to_string(schedule.rank_count()),
                    std::to_string(schedule.stages), std::to_string(schedule.micro_batches / schedule.slices),
                    number(plan->simulation.step_seconds), bound_text(*plan), percent(plan->simulation.bubble_ratio()),
                    number(peak_of(plan->simulation))});
    if (sliced) rows.back().insert(rows.back().begin() + 5, std::to_string(schedule.slices));
  }
  print_table(rows);
  std::cout << "\nAll schedules run the same model, in as many parts as the most stages of a schedule; the costs "
               "are those of these parts. peak: the most micro-batches of a part that a rank holds\n";
}

void print_plans(const std::vector<const SimulatedPlan*>& plans, const std::vector<StageCost>& costs,
                 const PlanOptions& options) {
  const SimulatedPlan& plan = *plans[0];
  std::cout << printable(plan.schedule.name) << ": " << plan.schedule.stages << " stages on "
            << plan.schedule.rank_count() << " ranks, " << plan.schedule.count_text() << ", p2 "
            << policy_name(plan.schedule.policy);
  if (!options.memory.empty()) std::cout << ", at most " << options.memory << " micro-batches per rank";
  std::cout << "\n\n";
  print_grid(plan, grid_unit(costs));
  std::cout << '\n';
  print_summary(plans);
  for (const SimulatedPlan* each : plans) {
    std::cout << '\n';
    print_ranks(*each);
  }
}

void write_plans(const std::vector<const SimulatedPlan*>& plans, const PlanOptions& options) {
  nlohmann::ordered_json json;
  json["schedule"] = plans[0]->schedule.name;
  json["stages"] = plans[0]->schedule.stages;
  json["micro_batches"] = plans[0]->schedule.micro_batches / plans[0]->schedule.slices;
  json["slices"] = plans[0]->schedule.slices;  // "micro_batch" of ops and peaks then counts slices
  for (const SimulatedPlan* plan : plans) json["plans"].push_back(to_json(*plan, !options.no_ops));
  if (plans.size() > 1 && plans[0]->simulation.step_seconds > 0) {
    json["speed_up"] = plans.back()->simulation.step_seconds / plans[0]->simulation.step_seconds;
  }
  write_output("--json", options.json, json.dump(1) + "\n");
}

}  // namespace twobp
