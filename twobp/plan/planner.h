// Ways to run a model on a machine: every combination of schedule, p2 policy, ranks, micro-batches, their
// size, their slices and recomputation, ranked by predicted throughput under a memory cap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "twobp/core/measure.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp {

// The machine's network, if it differs from the one on which the cost model was measured.
struct Interconnect {
  std::optional<LinkSpeed> link;   // between two ranks; none: the cost model's
  int ranks_per_node = 0;          // messages out of a node of this many ranks share one link; 0: no sharing
  std::optional<LinkSpeed> node;   // that shared link; none: as between two ranks
  std::optional<LinkSpeed> data;   // for sums over replicas, and exchanges of experts in several nodes; none: as out of
                                   // a node, or between two ranks
  double bucket_bytes = 25 << 20;  // gradients summed at once, see DataParallel; the configuration's default
};

struct PlanChoice;

struct PlanRequest {
  std::vector<int> ranks;              // N; empty: derived from `stages` and from written schedules
  std::vector<int> stages;             // only these numbers; empty: the schedule's usual number on each rank
  std::vector<int> micro_batches;      // M; empty: N, 2N and 4N
  std::vector<int> micro_batch_sizes;  // samples; empty: those of the cost model
  std::vector<int> slices;             // of each micro-batch's sequences; empty: all that the costs have
  // Empty: all named schedules. A written one has its own ranks, stages and micro-batches. If the numbers
  // that are asked for leave these out, it is not planned.
  std::vector<AskedSchedule> schedules;
  std::vector<int> data_parallel;  // replicas of the pipeline, which sum their gradients; empty: 1
  int experts = 1;                 // replicas that share the experts of each layer, as in the cost model
  std::vector<P2Policy> policies;  // of schedules without one of their own; empty: all that it admits
  // Of recompute_names(); empty: all, or none if the costs include recomputation.
  std::vector<std::string> recompute;
  std::vector<bool> streams = {false};  // whether gradients are streamed (SimulationOptions::streams), not with p2 off
  int batch = 0;                        // samples in a step over all replicas must equal this; 0: any number
  int devices = 0;                      // ranks x replicas must equal this; 0: any number
  Interconnect interconnect;
  bool one_memory = false;  // see WeightPlaces
  double memory = 0;        // bytes of each rank for everything; 0: no limit
  int top = 10;             // number of results; 0: all that fit
  // Why training refuses a choice whatever its schedule; empty: it does not. None: all are trained.
  std::function<std::string(const PlanChoice&)> refusal{};
  bool search = false;  // also search other splits and schedules: move_layers.h, auto_schedule.h
};

struct PlanChoice {
  ScheduleSource schedule = "1f1b";
  P2Policy policy = P2Policy::kOff;
  int ranks = 0;
  int stages = 0;
  int frozen_stages = 0;  // the first of `stages`, of frozen layers alone (after_frozen_stages)
  int micro_batches = 0;
  int micro_batch_size = 0;
  int slices = 1;  // of each micro-batch's sequences; slice_lengths of the cost model says where they are cut
  int data_parallel = 1;
  int experts = 1;
  std::string recompute = "none";
  bool streams = false;    // the gradients of all stages
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
  // The choices that fit, fastest first. Only the very first is the one with little memory among the fastest;
  // see ranking.h.
  std::vector<PlanChoice> best;
  int64_t combinations = 0;  // that the schedules admit and that have a layer for each stage
  // How many of them were simulated. The others cannot be among the best, by a bound on their throughput or
  // memory. If nothing fits, simulations for the smallest memory count, too.
  int64_t simulated = 0;
  // If nothing fits: the combination that needs the least memory. Its peak_bytes is what it needs.
  std::optional<PlanChoice> smallest;
  // What 2BP brings to the first choice, or to the first one without searched schedules: the step time of the
  // same schedule, split and memory with p2 off, divided by that of the choice, and bytes of the fullest rank
  // divided by those with p2 off.
  double speed_up = 1;
  double memory_factor = 1;
};

// "2BP: ..." for readers.
std::string gain_text(const PlanResult& result);

// Layers go to stages by their seconds, or, if that does not fit, by a split within the memory. Frozen first layers get
// stages of their own as in training, if the step is then more than 2 % faster. Throws Error
// if no combination is possible (too few layers, or nothing admitted: it says why), for unknown names, for
// sizes under 1, and for slices that the costs do not have.
PlanResult plan(const CostModel& model, const PlanRequest& request);

// The choice's schedule, ready to run.
Schedule schedule_of(const PlanChoice& choice);

// The inputs of the simulation of the choice in `plan`: costs of all stages, the links, the sums over
// replicas and the caps. `model` is the planned one, without the choice's recomputation.
struct PlannedRun {
  Schedule schedule;
  std::vector<StageCost> costs;
  SimulationOptions options;
};
PlannedRun planned_run(const CostModel& model, const PlanChoice& choice, const PlanRequest& request);

// The order of the planner's results. They are sorted by throughput, with one exception: a prediction cannot
// tell the fastest ones apart, so one of these with little memory comes first.
// Inserts into `best`, which is sorted by speed, then by least memory, and keeps at most `most` entries.
void insert_by_speed(std::vector<PlanChoice>& best, const PlanChoice& choice, size_t most);

// Only this many of the fastest are compared by memory.
inline constexpr size_t kCompared = 30;

// Considers those of the first kCompared that are within 1 % of the fastest. Returns the fastest whose memory
// is within 5 % of the least among them. A simulation differs from the real run by about this much. `best`:
// as insert_by_speed leaves it, not empty.
std::vector<PlanChoice>::iterator lightest_of_fastest(std::vector<PlanChoice>& best);

// Improves a split by simulation. A split that balances seconds need not be the fastest if ranks wait for
// each other or memory forces W early.
// Seconds of a step with this many layers in each stage; nullopt if it does not fit.
using SecondsOfSplit = std::function<std::optional<double>(const std::vector<int>& split)>;

// Improves `split`, which takes `seconds`. Moves one layer across one boundary between stages, or one across
// each of two boundaries, until no such move is faster or `most` splits have been tried. Every stage keeps a
// layer. Deterministic. The result is never slower than `split`, but often not the best of all.
std::vector<int> move_layers(std::vector<int> split, double seconds, int most, const SecondsOfSplit& seconds_of);

}  // namespace twobp
