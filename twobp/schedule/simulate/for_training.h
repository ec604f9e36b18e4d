// What training asks of a simulation: the options of its own transport, places of W for devices, and whether steps may
// overlap.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// Consecutive steps: the gain if a rank begins the next step as soon as it has ended its own part of the previous one,
// whatever the others do.
struct StepPeriods {
  double barrier = 0;  // seconds of a step if every rank waits at its end for the last one
  double overlap = 0;  // seconds from the end of a step to the end of the next if no rank waits
  double idle = 0;     // 1 - busy / overlap, mean over ranks

  // The speed-up over steps with a barrier.
  double gain() const { return overlap > 0 ? barrier / overlap : 1; }
};

// The result of the previous step that a rank needs to begin a step. It is nothing, or (with clipping, in float16) the
// norm of all gradients, which is known when the last rank has ended. In that case the rank assumes a norm, runs its
// leading F (check/walk.h), and then waits.
enum class NormNeed : uint8_t { kNone, kAfterForwards };

// The long run: simulates steps until each takes as long as the previous one on every rank, or else takes the mean over
// many. As in the executor, two steps can be under way at once. `options` has no `begin` and no `norm_known`. The
// messages of a step find links and memory empty. Throws Error as simulate() does.
StepPeriods step_periods(const Schedule& schedule, const std::vector<StageCost>& costs, SimulationOptions options = {},
                         NormNeed norm = NormNeed::kNone);

// Simulation options for this program's own transport between ranks that are threads of one process.
// A message takes no time of its own. Its memory is on its sender's account until the receiver takes it. `caps` in
// bytes, by rank; 0, or empty: none. Without timeline.
inline SimulationOptions in_process_simulation(const std::vector<int64_t>& caps = {}) {
  SimulationOptions options;
  options.message_holder = MessageHolder::kSender;
  options.cap_per_rank.assign(caps.begin(), caps.end());
  options.timeline = false;
  return options;
}

// The SimulationOptions::ahead, at most `most`, with the fastest step; 0 if it is not more than 2 % faster than with 0,
// or if waits do not run W.
int forwards_ahead(const Schedule& schedule, const std::vector<StageCost>& costs, SimulationOptions options, int most);

// Decides in advance where W fills waits, for ranks on devices: their host runs ahead and sees no waits.
// Returns a number of pieces of W by rank and instruction. At a receive, it is the number of pieces that the rank has
// run in the simulated step before the F or I that waits for the message begins. A rank that runs W up to this number
// at each receive fills the same waits as the simulation. At other instructions, the number is 0. Throws Error if
// `simulation`, which is of `schedule`, has no timeline.
std::vector<std::vector<int>> p2_places(const Schedule& schedule, const Simulation& simulation);

}  // namespace twobp
