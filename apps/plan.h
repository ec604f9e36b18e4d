// `twobp plan`: its options, and what its two jobs share. Without a model it simulates schedules with given
// costs; with a configuration or a cost model it compares all ways to run that model.
#pragma once

#include <string>
#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct PlanOptions {
  std::string schedule;       // names, or files that end in .csv; empty: 1f1b, or all with a configuration
  std::string stages;         // empty: by ranks; both empty: 4
  std::string ranks;          // empty: the schedule's own number for that many stages
  std::string micro_batches;  // empty: the schedule's own
  std::string slices;         // of a micro-batch; empty: 1, or with a model all that its costs have
  std::string p2;             // empty: the schedule's own
  std::string forward = "1";
  std::string backward_p1 = "1";
  std::string backward_p2 = "1";
  int p2_units = 1;
  // Links and replicas. With a configuration or costs they apply to the cost model and to all combinations.
  double latency = -1;  // negative: 0, or that of the cost model
  std::string message_seconds = "0";
  std::string bandwidth;  // bytes per second; empty: that of the cost model
  int share_links = 0;    // ranks that share the link out of their node; 0: no sharing
  std::string data_parallel;
  std::string experts;  // empty: as configured, or with `search` all that training takes
  std::string gradient_seconds = "0";
  std::string data_bandwidth;
  double data_latency = -1;  // negative: as latency
  int devices = 0;
  std::string json;
  bool no_ops = false;  // in the JSON
  std::string svg;
  double svg_end = 0;
  std::string csv;
  // With a configuration or costs: all combinations are compared, and the options above may be lists.
  std::string config;
  std::vector<std::string> overrides;
  std::string costs;              // a cost model; empty: measured
  std::string micro_batch_sizes;  // empty: half, once and twice the configured one
  std::string recompute;          // empty: all
  std::string gradients;          // empty: as configured
  std::string memory;             // bytes, or without a model micro-batches; empty: no limit
  int batch = 0;
  int top = 10;
  bool all = false;
  bool search = false;
  double seconds = 0.5;
};

// Parses "3" as 3, "2,4,8" as these numbers, and "2..5" as 2, 3, 4, 5. Lists and ranges may be mixed. The
// order is kept and repeats are dropped. Throws Error, which names the option, for any other text, for
// numbers under 1, and for an empty range.
std::vector<int> parse_counts(const std::string& option, const std::string& text);
// Does the same for an option that takes a single number here.
int parse_count(const std::string& option, const std::string& text);
// Returns the entries of "1f1b,zb-v". Throws Error, which names the option, if one is empty.
std::vector<std::string> parse_names(const std::string& option, const std::string& text);
// Parses "1.5" or "1,2,1.5": one number for all stages, or one for each stage.
std::vector<double> parse_costs(const std::string& option, const std::string& text, int stages);
// Writes the option's output to its file. Throws Error naming both.
void write_output(const std::string& option, const std::string& path, const std::string& text);

struct SimulatedPlan {
  Schedule schedule;
  Simulation simulation;
  // No schedule with this placement is faster under the caps. kUnknown means that the bound is not computed.
  double bound = 0;
};

// Returns the lower bound (plan/auto_schedule/lower_bound.h) for the schedule's placement. It is kUnknown if
// it would take long, or if the schedule gives up the order of micro-batches, which the bound assumes.
double bound_of(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options);

// Prints the schedule's plan first, then p2 `off` if that is a different plan.
void print_plans(const std::vector<const SimulatedPlan*>& plans, const std::vector<StageCost>& costs,
                 const PlanOptions& options);
// Prints a row for each plan.
void print_comparison(const std::vector<const SimulatedPlan*>& plans);
// Writes --json. Throws Error naming the file.
void write_plans(const std::vector<const SimulatedPlan*>& plans, const PlanOptions& options);
// Writes the CSV and the SVG that the options ask for.
void write_pictures(const SimulatedPlan& plan, const PlanOptions& options);

// The job without a configuration: costs come from the options. Draws one schedule beside the same with p2
// `off`, or compares several.
void plan_schedule(const PlanOptions& options);

// The job with one: measures or reads the costs, compares all combinations, and prints the best, and what 2BP
// gains there. Throws Error if nothing fits into the memory, with the smallest memory that would suffice.
void plan_model(const PlanOptions& options);

}  // namespace twobp
