// The subcommand reads costs, simulates the schedule and the same one with p2 `off`, and prints both side by
// side. It needs no tensors.
#include "apps/plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <sys/ioctl.h>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/generators.h"
#include "twobp/schedule/grid.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate.h"
#include "twobp/trace/simulated.h"
#include "twobp/trace/timeline.h"

namespace twobp {
namespace {

constexpr double kMostDrawnCells = 20000;  // a bigger grid is left out

struct PlanOptions {
  std::string schedule = "1f1b";
  int stages = 4;
  int micro_batches = 0;  // 0: the schedule's own
  std::string p2 = "fill";
  std::string forward = "1";
  std::string backward_p1 = "1";
  std::string backward_p2 = "1";
  int p2_units = 1;
  double cap = 0;
  std::string color = "auto";
  std::string json;
  std::string timeline;
};

struct Plan {
  Schedule schedule;
  Simulation simulation;
};

// "1.5", or "1,2,1.5": one number for all stages, or one for each.
std::vector<double> parse_costs(const std::string& option, const std::string& text, int stages) {
  std::vector<double> values;
  for (const auto& part : split(text, ',')) {
    double value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    TWOBP_CHECK(
        error == std::errc() && end == part.data() + part.size() && std::isfinite(value) && value >= 0,
        option, ": '", part, "' is not a cost: give a number of at least 0");
    values.push_back(value);
  }
  TWOBP_CHECK(values.size() == 1 || static_cast<int>(values.size()) == stages, option, " has ", values.size(),
              " values: give one, or one for each of the ", stages, " stages");
  if (values.size() == 1) values.resize(stages, values[0]);
  return values;
}

std::vector<StageCost> stage_costs(const PlanOptions& options) {
  const auto forward = parse_costs("--forward", options.forward, options.stages);
  const auto p1 = parse_costs("--backward-p1", options.backward_p1, options.stages);
  const auto p2 = parse_costs("--backward-p2", options.backward_p2, options.stages);
  std::vector<StageCost> costs(options.stages);
  for (int stage = 0; stage < options.stages; ++stage) {
    costs[stage].forward = forward[stage];
    costs[stage].backward_p1 = p1[stage];
    costs[stage].backward_p2 = p2[stage];
    costs[stage].p2_units = options.p2_units;
  }
  return costs;
}

Plan make_plan(const PlanOptions& options, P2Policy policy, const std::vector<StageCost>& costs) {
  Plan plan{make_schedule(options.schedule, options.stages, options.micro_batches, policy), {}};
  SimulationOptions simulation;
  if (options.cap > 0) simulation.cap_per_rank.assign(plan.schedule.ranks.size(), options.cap);
  plan.simulation = simulate(plan.schedule, costs, simulation);
  return plan;
}

// The shortest op there is, so that all are drawn to scale.
double grid_unit(const std::vector<StageCost>& costs) {
  double unit = 0;
  for (const auto& cost : costs) {
    for (double op : {cost.forward, cost.backward_p1, cost.backward_p2 / cost.p2_units}) {
      if (op > 0) unit = unit > 0 ? std::min(unit, op) : op;
    }
  }
  return unit > 0 ? unit : 1;
}

std::string number(double value) {
  std::ostringstream out;
  out << std::setprecision(5) << value;
  return out.str();
}

std::string percent(double fraction) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << 100 * fraction << " %";
  return out.str();
}

// Columns as wide as their widest entry; the first to the left, numbers to the right.
void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      std::cout << (i > 0 ? "  " : "") << (i > 0 ? std::right : std::left)
                << std::setw(static_cast<int>(widths[i])) << row[i];
    }
    std::cout << '\n';
  }
}

void print_ranks(const Plan& plan) {
  std::cout << "p2 " << policy_name(plan.schedule.policy) << ": busy and idle time of each rank\n";
  std::vector<std::vector<std::string>> rows = {{"rank", "busy"}};
  for (int cause = 0; cause < kIdleCauses; ++cause) {
    rows[0].emplace_back(idle_cause_name(static_cast<IdleCause>(cause)));
  }
  rows[0].emplace_back("idle");
  rows[0].emplace_back("peak micro-batches");
  for (int rank = 0; rank < plan.schedule.rank_count(); ++rank) {
    const auto& result = plan.simulation.ranks[rank];
    std::vector<std::string> row = {std::to_string(rank), number(result.busy)};
    for (double idle : result.idle) row.push_back(number(idle));
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

void print_summary(const std::vector<const Plan*>& plans) {
  std::vector<std::vector<std::string>> rows(5);
  rows[0] = {""};
  rows[1] = {"step time"};
  rows[2] = {"bubble ratio"};
  rows[3] = {"peak micro-batches"};
  rows[4] = {"speed-up over off"};
  const double standard = plans.back()->simulation.step_seconds;
  for (const Plan* plan : plans) {
    const Simulation& simulation = plan->simulation;
    rows[0].push_back(concat("p2 ", policy_name(plan->schedule.policy)));
    rows[1].push_back(number(simulation.step_seconds));
    rows[2].push_back(percent(simulation.bubble_ratio()));
    rows[3].push_back(std::to_string(most_in_flight(simulation)));
    rows[4].push_back(simulation.step_seconds > 0 ? number(standard / simulation.step_seconds) : "-");
  }
  if (plans.size() == 1) rows.pop_back();
  print_table(rows);
}

void print_grid(const Plan& plan, double unit, const PlanOptions& options) {
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  GridOptions grid;
  grid.color = options.color == "always" ||
               (options.color == "auto" && terminal && std::getenv("NO_COLOR") == nullptr);
  winsize size{};
  if (terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) grid.max_width = size.ws_col;
  const double cells = plan.simulation.step_seconds / unit * plan.schedule.rank_count();
  if (cells > kMostDrawnCells) {
    std::cout << "(the grid would have " << number(cells) << " cells and is left out)\n";
    return;
  }
  std::cout << draw_grid(plan.schedule, plan.simulation, unit, grid);
}

nlohmann::ordered_json to_json(const Plan& plan) {
  nlohmann::ordered_json json;
  json["p2"] = policy_name(plan.schedule.policy);
  json["step_time"] = plan.simulation.step_seconds;
  json["bubble_ratio"] = plan.simulation.bubble_ratio();
  for (int rank = 0; rank < plan.schedule.rank_count(); ++rank) {
    const auto& result = plan.simulation.ranks[rank];
    nlohmann::ordered_json entry;
    entry["busy"] = result.busy;
    for (int cause = 0; cause < kIdleCauses; ++cause) {
      entry["idle"][std::string(idle_cause_name(static_cast<IdleCause>(cause)))] = result.idle[cause];
    }
    entry["idle_fraction"] = plan.simulation.idle_fraction(rank);
    entry["peak_micro_batches"] = result.peak_in_flight;
    entry["timeline"] = nlohmann::ordered_json::array();
    for (const auto& op : result.timeline) {
      entry["timeline"].push_back({{"op", op_name(op.op)},
                                   {"stage", op.stage},
                                   {"micro_batch", op.micro_batch},
                                   {"begin", op.begin},
                                   {"end", op.end}});
    }
    json["ranks"].push_back(std::move(entry));
  }
  return json;
}

void write_json(const std::vector<const Plan*>& plans, const std::string& path) {
  nlohmann::ordered_json json;
  json["schedule"] = plans[0]->schedule.name;
  json["stages"] = plans[0]->schedule.stages;
  json["micro_batches"] = plans[0]->schedule.micro_batches;
  for (const Plan* plan : plans) json["plans"].push_back(to_json(*plan));
  if (plans.size() > 1 && plans[0]->simulation.step_seconds > 0) {
    json["speed_up"] = plans.back()->simulation.step_seconds / plans[0]->simulation.step_seconds;
  }
  std::ofstream file(path);
  file << json.dump(1) << '\n';
  file.flush();
  TWOBP_CHECK(file.good(), "--json: cannot write '", path, "': is its folder there and writable?");
}

void write_timeline(const std::vector<const Plan*>& plans, const std::vector<StageCost>& costs,
                    const std::string& path) {
  const Schedule& schedule = plans[0]->schedule;
  Trace trace;
  trace.simulated = true;
  trace.title =
      concat(schedule.name, ", ", schedule.stages, " stages, ", schedule.micro_batches, " micro-batches");
  for (const Plan* plan : plans) {
    trace.step_names.push_back(concat("p2 ", policy_name(plan->schedule.policy)));
    trace.steps.push_back(simulated_step(plan->schedule, costs, plan->simulation));
  }
  write_trace_file(path, timeline_html(trace));
}

void run_plan(PlanOptions options) {
  const P2Policy policy = parse_policy(options.p2);
  if (options.micro_batches == 0) {
    options.micro_batches = default_micro_batches(options.schedule, options.stages);
  }
  TWOBP_CHECK(options.stages >= 1, "--stages must be at least 1, got ", options.stages);
  const auto costs = stage_costs(options);
  const Plan plan = make_plan(options, policy, costs);
  std::vector<const Plan*> plans = {&plan};
  Plan standard;
  if (policy != P2Policy::kOff) {
    standard = make_plan(options, P2Policy::kOff, costs);
    plans.push_back(&standard);
  }

  std::cout << plan.schedule.name << ": " << plan.schedule.stages << " stages on "
            << plan.schedule.rank_count() << " ranks, " << plan.schedule.micro_batches
            << " micro-batches, p2 " << options.p2;
  if (options.cap > 0) std::cout << ", at most " << number(options.cap) << " micro-batches a rank";
  std::cout << "\n\n";
  print_grid(plan, grid_unit(costs), options);
  std::cout << '\n';
  print_summary(plans);
  for (const Plan* each : plans) {
    std::cout << '\n';
    print_ranks(*each);
  }
  if (!options.json.empty()) write_json(plans, options.json);
  if (!options.timeline.empty()) write_timeline(plans, costs, options.timeline);
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* plan = app.add_subcommand("plan", "Draw and time a schedule from given costs");
  const auto text = [&](const char* flag, std::string& value, const std::string& help) {
    return plan->add_option(flag, value, help)->capture_default_str();
  };
  text("--schedule", options->schedule, "one of " + join(schedule_names()));
  plan->add_option("--stages", options->stages, "number of stages N")->capture_default_str();
  plan->add_option("--micro-batches", options->micro_batches, "number M (default: the schedule's own)")
      ->check(CLI::PositiveNumber);
  text("--p2", options->p2, "when weight gradients run: " + join(policy_names()));
  text("--forward", options->forward, "cost of F: a number, or a comma list with one per stage");
  text("--backward-p1", options->backward_p1, "cost of I, likewise");
  text("--backward-p2", options->backward_p2, "cost of W, likewise");
  plan->add_option("--p2-units", options->p2_units, "pieces W runs in while waiting for a message")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  plan->add_option("--cap", options->cap, "most micro-batches a rank may hold; 0: any number")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  text("--color", options->color, "auto, always or never")->check(CLI::IsMember({"auto", "always", "never"}));
  plan->add_option("--json", options->json, "also write the result to this file");
  plan->add_option("--timeline", options->timeline, "also draw it as an HTML page");
  plan->callback([options] { run_plan(*options); });
}

}  // namespace twobp
