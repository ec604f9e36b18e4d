// Internal to this folder: the bytes of one micro-batch in a stage as the simulation
// (schedule/simulate/stage_model.h) counts them on the stage's rank, messages and layers included, summed up
// for who looks at whole ops.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

struct StageBytes {
  double activation = 0;    // from F until I: the input, and what F adds, less the output, which is sent away
  double stash = 0;         // from I until W
  double forward_peak = 0;  // most during F, its input and output included
  double p1_peak = 0;       // most during I beside the activations
  double p2_peak = 0;       // most during W beside the stash
  int p2_units = 1;
  bool stops_within = false;  // W may run between the layers of an F or I, to make room for the next
  // What costs of layers that do not add up may take away again, per micro-batch: 0 for those that do.
  double deficit = 0;
};

// Of stages in model order, as `simulate` takes them (and as check_stage_cost wants them).
std::vector<StageBytes> stage_bytes(const std::vector<StageCost>& costs);

// What each rank needs at the very least: one micro-batch in all of its stages. Without messages and layers
// a schedule that fits exists under every cap from there on; they may need some more.
std::vector<double> least_activation_bytes(const std::vector<int>& rank_of_stage,
                                           const std::vector<StageCost>& costs);

}  // namespace twobp
