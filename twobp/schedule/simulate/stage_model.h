// Internal to this folder: a stage's cost as the simulation uses it, layer by layer or as a whole.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// The effect of an op on the bytes of its rank: the most held during it and the rest after it, relative to before.
struct Growth {
  double seconds = 0;
  double peak = 0;
  double held = 0;
  double need = 0;   // room it needs under a byte cap: for itself, and for any W right after it
  int p2_units = 0;  // of an I: the pieces of W that can run from then on
  // Of a layer whose experts replicas share: see LayerCost::forward_to_experts.
  double to_experts = 0;
  double from_experts = 0;
  double beside_experts = 0;

  bool exchanges() const { return to_experts > 0 || from_experts > 0; }
};

// F, I or B of one stage.
struct OpModel {
  std::vector<Growth> steps;  // layer by layer, in the order they run
  Growth whole;               // all steps at once; if `need` fits, every layer has room; may be negative
  bool exchanges = false;     // some step does

  void finish();  // fills `whole` from `steps`
};

struct P2Piece {
  double begin = 0;     // seconds of the pieces before it
  double freed = 0;     // bytes that the previous pieces freed
  double peak = 0;      // the most held during it, relative to before
  double gradient = 0;  // bytes of streamed gradients during it, less those of I that have been applied before
  size_t layer = 0;     // of the stage
};

struct StageModel {
  OpModel forward;
  OpModel backward_p1;
  OpModel backward;             // B: its steps are whole layers' I and W
  std::vector<P2Piece> pieces;  // of W, in the order they run; one more at the end, with the sums
  bool p2_peaks = false;        // some piece has a peak
  double p2_seconds = 0;        // W within B
  double output = 0;            // bytes of messages
  double input_gradient = 0;
  double largest_p2 = 0;  // bytes that W of some layer of its rank needs while it runs

  int p2_units() const { return static_cast<int>(pieces.size()) - 1; }
};

// The models of all stages, row by row: as many as `costs`, in that order. Without
// `has_backward`, nothing is kept after F. `smallest_first`, by stage: whether W runs in the order of the gradients'
// bytes; empty: none.
std::vector<StageModel> stage_models(const Schedule& schedule, const std::vector<StageCost>& costs, bool has_backward,
                                     const std::vector<bool>& smallest_first = {});

}  // namespace twobp
