// Which way to run a model on a machine: every combination of schedule, p2 policy, ranks, micro-batches,
// their size and recomputation, by predicted throughput under a memory cap.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "twobp/plan/adviser.h"
#include "twobp/plan/cost_model.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

struct PlanRequest {
  std::vector<int> ranks;              // N; empty: what `stages` asks for
  std::vector<int> stages;             // only so many; empty: the schedule's usual number on each rank
  std::vector<int> micro_batches;      // M; empty: N, 2N and 4N
  std::vector<int> micro_batch_sizes;  // samples; empty: those of the cost model
  std::vector<std::string> schedules;  // empty: all that have a name and can be run
  std::vector<P2Policy> policies;      // empty: all that the schedule admits
  std::vector<std::string> recompute;  // of recompute_modes(); empty: all, or none for costs that have it
  int batch = 0;                       // M x micro-batch size has to be this; 0: any number
  double memory = 0;                   // bytes a rank has for everything; 0: any number
  int top = 10;                        // so many of the best; 0: all that fit
  bool search = false;                 // also look for schedules without a name: see auto_schedule.h
};

struct PlanChoice {
  std::string schedule;
  P2Policy policy = P2Policy::kOff;
  int ranks = 0;
  int stages = 0;
  int micro_batches = 0;
  int micro_batch_size = 0;
  std::string recompute = "none";
  std::vector<int> split;  // layers of each stage
  double step_seconds = 0;
  double bubble = 0;              // mean idle fraction
  double peak_bytes = 0;          // of the fullest rank, everything included
  std::optional<Schedule> found;  // by the search; `schedule` is "auto" then

  double samples() const { return static_cast<double>(micro_batches) * micro_batch_size; }  // of a step
  double samples_per_second() const { return samples() / step_seconds; }
};

struct PlanResult {
  std::vector<PlanChoice> best;  // those that fit, the fastest first; of equals, the one with less memory
  int64_t combinations = 0;      // that the schedules admit and that have a layer for each stage
  int64_t simulated = 0;         // the others cannot be among the best, by a bound on their throughput
  // Nothing fits: the combination that needs the least memory; peak_bytes is what it needs.
  std::optional<PlanChoice> smallest;
  // On the best one with a name, or its schedule with the default policy if that is off; nullopt: nothing
  // fits.
  std::optional<Advice> advice;
};

// Layers go to stages by their seconds; where that does not fit, by a split within the memory. Throws Error:
// no combination is possible (too few layers, nothing admitted: says why), unknown names, sizes under 1.
PlanResult plan(const CostModel& model, const PlanRequest& request);

// The choice's schedule, ready to run, and simulated again as `plan` did.
Schedule schedule_of(const PlanChoice& choice);
Simulation simulate_choice(const CostModel& model, const PlanChoice& choice, double memory = 0);

}  // namespace twobp
