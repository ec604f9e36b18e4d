// Which way to run a model on a machine: every combination of schedule, p2 policy, ranks, micro-batches,
// their size and recomputation, by predicted throughput under a memory cap.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "twobp/core/link_speed.h"
#include "twobp/plan/adviser.h"
#include "twobp/plan/cost_model.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

// The machine's network, where it is another than the one that the cost model was measured on.
struct Interconnect {
  std::optional<LinkSpeed> link;  // between two ranks; none: the cost model's
  int ranks_per_node = 0;         // what leaves a node of so many ranks shares one link; 0: nothing is shared
  std::optional<LinkSpeed> node;  // that link; none: as between two ranks
  std::optional<LinkSpeed> data;  // of the sums over replicas; none: as out of a node, or between two ranks
  double bucket_bytes = 25 << 20;  // gradients summed at once, see DataParallel; the configuration's default
};

struct PlanRequest {
  std::vector<int> ranks;              // N; empty: what `stages` asks for
  std::vector<int> stages;             // only so many; empty: the schedule's usual number on each rank
  std::vector<int> micro_batches;      // M; empty: N, 2N and 4N
  std::vector<int> micro_batch_sizes;  // samples; empty: those of the cost model
  std::vector<std::string> schedules;  // empty: all that have a name
  std::vector<int> data_parallel;      // replicas of the pipeline, which sum their gradients; empty: 1
  std::vector<P2Policy> policies;      // empty: all that the schedule admits
  std::vector<std::string> recompute;  // of recompute_modes(); empty: all, or none for costs that have it
  int batch = 0;                       // samples of a step, of all replicas, have to be this; 0: any number
  int devices = 0;                     // ranks x replicas have to be this; 0: any number
  Interconnect interconnect;
  double memory = 0;    // bytes a rank has for everything; 0: any number
  int top = 10;         // so many of the best; 0: all that fit
  bool search = false;  // for other splits and schedules, too: move_layers.h, auto_schedule.h
};

struct PlanChoice {
  std::string schedule;
  P2Policy policy = P2Policy::kOff;
  int ranks = 0;
  int stages = 0;
  int micro_batches = 0;
  int micro_batch_size = 0;
  int data_parallel = 1;
  std::string recompute = "none";
  std::vector<int> split;  // layers of each stage
  double step_seconds = 0;
  double bubble = 0;              // mean idle fraction
  double peak_bytes = 0;          // of the fullest rank, everything included
  std::optional<Schedule> found;  // by the search; `schedule` is "auto" then

  // Of a step, of all replicas.
  double samples() const { return static_cast<double>(micro_batches) * micro_batch_size * data_parallel; }
  double samples_per_second() const { return samples() / step_seconds; }
};

struct PlanResult {
  // Those that fit, the fastest first; but before all the one with little memory among the fastest, see
  // ranking.h.
  std::vector<PlanChoice> best;
  int64_t combinations = 0;  // that the schedules admit and that have a layer for each stage
  // Of these; the others cannot be among the best, by a bound on their throughput or on their memory. Where
  // nothing fits, simulations for the smallest memory count, too.
  int64_t simulated = 0;
  // Nothing fits: the combination that needs the least memory; peak_bytes is what it needs.
  std::optional<PlanChoice> smallest;
  // On the first one, or what would be first without searched schedules; its schedule has the default policy
  // if that is off. nullopt: nothing fits.
  std::optional<Advice> advice;
};

// Layers go to stages by their seconds; where that does not fit, by a split within the memory. Throws Error:
// no combination is possible (too few layers, nothing admitted: says why), unknown names, sizes under 1.
PlanResult plan(const CostModel& model, const PlanRequest& request);

// The choice's schedule, ready to run.
Schedule schedule_of(const PlanChoice& choice);

// What `plan` simulated for the choice: costs of all stages, the links, the sums over
// replicas and the caps. `model` is the one that was planned, without the choice's recomputation.
struct PlannedRun {
  Schedule schedule;
  std::vector<StageCost> costs;
  SimulationOptions options;
};
PlannedRun planned_run(const CostModel& model, const PlanChoice& choice, const PlanRequest& request);
Simulation simulate_choice(const CostModel& model, const PlanChoice& choice, const PlanRequest& request = {});

}  // namespace twobp
