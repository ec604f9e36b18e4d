// Simulates one schedule with given costs, draws it, and compares it with the same schedule and p2 `off`.
#pragma once

#include <vector>

#include "apps/plan_options.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct SimulatedPlan {
  Schedule schedule;
  Simulation simulation;
};

// Prints the schedule's plan first, then p2 `off` if that is a different plan.
void print_plans(const std::vector<const SimulatedPlan*>& plans, const std::vector<StageCost>& costs,
                 const PlanOptions& options);
// Writes --json. Throws Error naming the file.
void write_plans(const std::vector<const SimulatedPlan*>& plans, const PlanOptions& options);

// Writes the CSV, the SVG and the HTML page that the options ask for. The page shows all plans, the others
// only the schedule's own.
void write_pictures(const std::vector<const SimulatedPlan*>& plans, const std::vector<StageCost>& costs,
                    const PlanOptions& options);

// `twobp plan` without a configuration: costs come from the options.
void plan_schedule(const PlanOptions& options);

}  // namespace twobp
