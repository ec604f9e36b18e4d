// The bytes of stages and ranks, and what fits into a rank's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

// The bytes of one micro-batch, or slice, in a stage, as the simulation (schedule/simulate/stage_model.h)
// counts them on the stage's rank. They include messages and layers, summed up for code that works with whole
// ops.
struct StageBytes {
  double activation = 0;    // from F until I: the input, plus F's growth, less the output, which is sent
  double stash = 0;         // from I until W
  double forward_peak = 0;  // most during F, its input and output included
  double p1_peak = 0;       // most during I, in addition to the activations
  double p2_peak = 0;       // most during W, in addition to the stash
  int p2_units = 1;
  // Bytes that I adds to the rank for other slices: a slice's I makes gradients of earlier slices' keys and
  // values, and the I of those slices frees them. The sum over the slices of a micro-batch is 0.
  double for_others = 0;
  // Bytes for each micro-batch by which inconsistent costs of layers may go below zero. 0 for consistent
  // costs.
  double deficit = 0;
};

// The bytes of stages in model order. `costs` has rows of an entry for each stage, as `simulate` takes them
// (and check_stage_cost accepts them): one row, or one for each of `slices` slices, of one micro-batch or of
// several.
std::vector<StageBytes> stage_bytes(const std::vector<StageCost>& costs, int stages, int slices = 1);

// The least bytes that each rank needs: one micro-batch, with all its slices, in all of its stages. Without
// messages and layers, a schedule that fits exists under every cap from there on. With them it may need some
// more. `costs` as for stage_bytes.
std::vector<double> least_activation_bytes(const std::vector<int>& rank_of_stage, const std::vector<StageCost>& costs,
                                           int slices = 1);

// Bytes that each rank may hold in addition to fixed_bytes, for SimulationOptions::cap_per_rank. `memory` 0:
// no caps. `costs` as for simulate.
std::vector<double> caps_for(double memory, const std::vector<int>& rank_of_stage, int ranks,
                             const std::vector<StageCost>& costs);

// The costs of stages that stream their gradients, which then belong to no fixed bytes.
std::vector<StageCost> without_gradients(std::vector<StageCost> costs);

// Bytes of the fullest rank, everything included.
double peak_of(const Simulation& simulation);
// Whether that, or these bytes, are at most `memory`, up to rounding. 0: no limit.
bool fits(const Simulation& simulation, double memory);
bool fits(double bytes, double memory);

// Bytes that standard backpropagation holds on each rank. The automatic byte cap (MemoryCap) derives from them.

// Peak bytes of activations of each rank when `schedule` (p2 off: only F and B) runs with the given costs.
std::vector<int64_t> standard_peaks(const Schedule& schedule, const std::vector<StageCost>& costs);

// The automatic caps in bytes, by rank. `fixed[r]`: bytes of parameters, gradients and optimizer state on rank r.
std::vector<int64_t> auto_caps(const std::vector<int64_t>& standard_peaks, const std::vector<int64_t>& fixed,
                               double times = 1);

}  // namespace twobp
