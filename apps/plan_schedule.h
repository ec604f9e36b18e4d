// One schedule with given costs: simulated, drawn and set beside the same one with p2 `off`.
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

// The schedule's plan first, p2 `off` behind it if that is another.
void print_plans(const std::vector<const SimulatedPlan*>& plans, const std::vector<StageCost>& costs,
                 const PlanOptions& options);
// Throws Error naming the file.
void write_plans(const std::vector<const SimulatedPlan*>& plans, const PlanOptions& options);

// The CSV, the SVG and the HTML page, those that the options ask for; of the schedule's plan, the page of
// all.
void write_pictures(const std::vector<const SimulatedPlan*>& plans, const std::vector<StageCost>& costs,
                    const PlanOptions& options);

// `twobp plan` without a configuration: costs come from the options.
void plan_schedule(const PlanOptions& options);

}  // namespace twobp
