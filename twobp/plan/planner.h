// Ways to run a model on a machine: every combination of schedule, p2 policy, ranks, micro-batches, their size, their
// slices and recomputation, ranked by predicted throughput under a memory cap.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "twobp/core/measure.h"
#include "twobp/plan/adviser.h"
#include "twobp/plan/cost_model.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp {

// The machine's network, if it differs from the one on which the cost model was measured.
struct Interconnect {
  std::optional<LinkSpeed> link;   // between two ranks; none: the cost model's
  int ranks_per_node = 0;          // messages out of a node of this many ranks share one link; 0: no sharing
  std::optional<LinkSpeed> node;   // that shared link; none: as between two ranks
  std::optional<LinkSpeed> data;   // for the sums over replicas; none: as out of a node, or between two ranks
  double bucket_bytes = 25 << 20;  // gradients summed at once, see DataParallel; the configuration's default
};

struct PlanRequest {
  std::vector<int> ranks;              // N; empty: derived from `stages` and from written schedules
  std::vector<int> stages;             // only these numbers; empty: the schedule's usual number on each rank
  std::vector<int> micro_batches;      // M; empty: N, 2N and 4N
  std::vector<int> micro_batch_sizes;  // samples; empty: those of the cost model
  std::vector<int> slices;             // of each micro-batch's sequences; empty: all that the costs have
  // Empty: all named schedules. A written one has its own ranks, stages and micro-batches. If the numbers that are
  // asked for leave these out, it is not planned.
  std::vector<AskedSchedule> schedules;
  std::vector<int> data_parallel;  // replicas of the pipeline, which sum their gradients; empty: 1
  std::vector<P2Policy> policies;  // of schedules without one of their own; empty: all that it admits
  // Of recompute_names(); empty: all, or none if the costs include recomputation.
  std::vector<std::string> recompute;
  int batch = 0;    // samples in a step over all replicas must equal this; 0: any number
  int devices = 0;  // ranks x replicas must equal this; 0: any number
  Interconnect interconnect;
  double memory = 0;    // bytes of each rank for everything; 0: no limit
  int top = 10;         // number of results; 0: all that fit
  bool search = false;  // also search other splits and schedules: move_layers.h, auto_schedule.h
};

struct PlanChoice {
  ScheduleSource schedule = "1f1b";
  P2Policy policy = P2Policy::kOff;
  int ranks = 0;
  int stages = 0;
  int micro_batches = 0;
  int micro_batch_size = 0;
  int slices = 1;  // of each micro-batch's sequences; slice_lengths of the cost model says where they are cut
  int data_parallel = 1;
  std::string recompute = "none";
  std::vector<int> split;  // layers of each stage
  double step_seconds = 0;
  double bubble = 0;              // mean idle fraction
  double peak_bytes = 0;          // of the fullest rank, everything included
  std::optional<Schedule> found;  // from the search; then the name of `schedule` is "auto"

  // Samples of a step, over all replicas.
  double samples() const { return static_cast<double>(micro_batches) * micro_batch_size * data_parallel; }
  double samples_per_second() const { return samples() / step_seconds; }
};

struct PlanResult {
  // The choices that fit, fastest first. Only the very first is the one with little memory among the fastest; see
  // ranking.h.
  std::vector<PlanChoice> best;
  int64_t combinations = 0;  // that the schedules admit and that have a layer for each stage
  // How many of them were simulated. The others cannot be among the best, by a bound on their throughput or memory. If
  // nothing fits, simulations for the smallest memory count, too.
  int64_t simulated = 0;
  // If nothing fits: the combination that needs the least memory. Its peak_bytes is what it needs.
  std::optional<PlanChoice> smallest;
  // Advice on the first choice, or on the first one without searched schedules. Its schedule has the default policy if
  // that of the choice is off. nullopt: nothing fits.
  std::optional<Advice> advice;
};

// Layers go to stages by their seconds, or, if that does not fit, by a split within the memory. Throws Error if no
// combination is possible (too few layers, or nothing admitted: it says why), for unknown names, for sizes under 1, and
// for slices that the costs do not have.
PlanResult plan(const CostModel& model, const PlanRequest& request);

// The choice's schedule, ready to run.
Schedule schedule_of(const PlanChoice& choice);

// The inputs of the simulation of the choice in `plan`: costs of all stages, the links, the sums over replicas and the
// caps. `model` is the planned one, without the choice's recomputation.
struct PlannedRun {
  Schedule schedule;
  std::vector<StageCost> costs;
  SimulationOptions options;
};
PlannedRun planned_run(const CostModel& model, const PlanChoice& choice, const PlanRequest& request);
Simulation simulate_choice(const CostModel& model, const PlanChoice& choice, const PlanRequest& request = {});

}  // namespace twobp
