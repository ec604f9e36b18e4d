// Whether 2BP pays off for a job, and why, in sentences. Compares a schedule with the same schedule and p2 off.
#pragma once

#include <string>
#include <vector>

#include "twobp/schedule/schedule_source.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct AdviceRequest {
  ScheduleSource schedule = "1f1b";
  int stages = 1;
  int ranks = 1;
  int micro_batches = 1;
  int slices = 1;  // of each micro-batch
  P2Policy policy = P2Policy::kFill;
  std::vector<StageCost> costs;
  SimulationOptions options;  // the links; caps derive from `memory`
  double memory = 0;          // bytes of memory of each rank, fixed_bytes included; 0: no limit
};

struct Advice {
  double speed_up = 1;       // step time with p2 off, divided by that of the policy
  double memory_factor = 1;  // bytes of the fullest rank, divided by those with p2 off
  double bubble = 0;         // mean idle fraction
  double bubble_off = 0;
  bool helps = false;  // the gain is 1 % or more, within the memory

  // The failure signatures of arXiv 2405.18047.
  // 1: it fits with p2 off, but the data for W, kept until W runs in the waits, do not fit.
  bool out_of_memory_in_p2 = false;
  // 2: no gain, and one p1 of the busiest rank takes longer than all the time that the rank waits in a step with p2
  // off, apart from its start-up, when there is no W yet.
  bool p1_longer_than_idle = false;
  // 3: the ranks' p1 or p2 differ (the largest is at least 1.5 times the mean), and if all stages were equal to their
  // mean, the bubble would be smaller by 0.02 or more.
  bool unequal_p1_and_p2 = false;

  std::vector<std::string> sentences;  // the verdict first, then one for each signature
};

// Throws Error as make_schedule and simulate do.
Advice advise(const AdviceRequest& request);

// Bytes that each rank may hold in addition to fixed_bytes, for SimulationOptions::cap_per_rank. `memory` 0: no caps.
// `costs` as for simulate.
std::vector<double> caps_for(double memory, const std::vector<int>& rank_of_stage, int ranks,
                             const std::vector<StageCost>& costs);

// Bytes of the fullest rank, everything included.
double peak_of(const Simulation& simulation);
// Whether that, or these bytes, are at most `memory`, up to rounding. 0: no limit.
bool fits(const Simulation& simulation, double memory);
bool fits(double bytes, double memory);

}  // namespace twobp
