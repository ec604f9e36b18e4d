// Simulates schedules with given costs. Draws one beside the same schedule with p2 `off`, or compares several.
#pragma once

#include <string>
#include <vector>

#include "apps/plan_options.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct SimulatedPlan {
  Schedule schedule;
  Simulation simulation;
  // No schedule with this placement is faster under the caps. kUnknown means that the bound is not computed.
  double bound = 0;
};

// Returns the lower bound (plan/auto_schedule/lower_bound.h) for the schedule's placement. It is kUnknown if it would
// take long, or if the schedule gives up the order of micro-batches, which the bound assumes.
double bound_of(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options);

// Prints the schedule's plan first, then p2 `off` if that is a different plan.
void print_plans(const std::vector<const SimulatedPlan*>& plans, const std::vector<StageCost>& costs,
                 const PlanOptions& options);
// Prints a row for each plan.
void print_comparison(const std::vector<const SimulatedPlan*>& plans);
// Writes --json. Throws Error naming the file.
void write_plans(const std::vector<const SimulatedPlan*>& plans, const PlanOptions& options);

struct DrawnPlan {
  std::string name;  // of its part of the page
  const SimulatedPlan* plan = nullptr;
};
// Writes the CSV, the SVG and the HTML page that the options ask for. The page shows all plans, the other files only
// the first.
void write_pictures(const std::vector<DrawnPlan>& plans, const PlanOptions& options);

// `twobp plan` without a configuration: costs come from the options.
void plan_schedule(const PlanOptions& options);

}  // namespace twobp
