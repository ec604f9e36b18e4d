// The time, the idle time and the bytes of a schedule, from given costs: discrete events over the same
// instruction lists and with the same rules (fill, byte cap) as the executor.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// Seconds (or any unit) per micro-batch of one stage, and bytes (or any unit) it holds for one.
struct StageCost {
  double forward = 1;
  double backward_p1 = 1;
  double backward_p2 = 1;
  int p2_units = 1;             // pieces W runs in under `fill`: a rank looks for its message between pieces
  double optimizer = 0;         // seconds per step, after the rank's last instruction
  double activation_bytes = 1;  // held per micro-batch from F until I
  double stash_bytes = 1;       // held per micro-batch from I until W
};

struct SimulationOptions {
  double message_seconds = 0;        // from the end of the sending op until the receiver has it
  std::vector<double> cap_per_rank;  // most bytes a rank may hold; empty or 0: no cap
};

// Why a rank was idle.
enum class IdleCause : int {
  kStartUp,  // before its first F of the step
  kMessage,  // waiting for a message while W was pending (policies that do not fill)
  kNothing,  // waiting for a message with no W left to fill
  kTail,     // done, while other ranks were not
};
inline constexpr int kIdleCauses = 4;
std::string_view idle_cause_name(IdleCause cause);  // "start-up", "message", "nothing to fill", "tail"

// One op as it ran. W pieces of a micro-batch that ran back to back are one entry. B appears as an I entry
// followed by a W entry.
struct SimulatedOp {
  Op op = Op::kForward;
  int stage = 0;
  int micro_batch = 0;
  double begin = 0;
  double end = 0;
};

struct RankSimulation {
  double busy = 0;                         // F + I + W + optimizer
  std::array<double, kIdleCauses> idle{};  // by IdleCause; busy + sum(idle) = step
  double peak_bytes = 0;                   // activations and stash
  int peak_in_flight = 0;                  // micro-batches (of any of its stages) between F and W
  std::vector<SimulatedOp> timeline;
};

struct Simulation {
  double step_seconds = 0;  // until the last rank is done, optimizer included
  std::vector<RankSimulation> ranks;

  // 1 - busy / step of one rank.
  double idle_fraction(int rank) const;
  // The mean of it over ranks: the bubble ratio.
  double bubble_ratio() const;
};

// `costs` has one entry a stage. Bytes: F adds activation_bytes at its start, I replaces them by stash_bytes
// at its end, each W piece frees its share. Before an F or I that would push the rank over its cap, the
// oldest pending W runs piece by piece until it fits, whatever the policy; what cannot fit at all runs
// anyway. B works layer by layer: it frees its activations at its end, has no stash and so never needs room.
// A schedule without any backward holds an F's bytes only while it runs, and has no optimizer.
//
// Time and memory grow linearly with the number of instructions.
//
// Throws Error when costs are missing, negative or not finite, or the schedule is not valid (see validate).
Simulation simulate(const Schedule& schedule, const std::vector<StageCost>& costs,
                    const SimulationOptions& options = {});

}  // namespace twobp
