// What one stage costs, as the simulation, the planner and the auto-scheduler take it.
#pragma once

#include <vector>

namespace twobp {

// One layer of a stage. Seconds are weights: how the stage's own seconds divide among its layers. Bytes of
// one micro-batch are relative to what is held when the op reaches the layer, its input included.
struct LayerShare {
  double forward = 1;
  double backward_p1 = 1;
  double backward_p2 = 1;
  int p2_units = 1;           // pieces of its W; 0: it has none
  double forward_peak = 0;    // most during F
  double forward_held = 0;    // after F, its output included: may be negative
  double p1_peak = 0;         // most during I
  double p1_held = 0;         // after I, dL/dx included: may be negative
  double stash = 0;           // freed by its W, an equal share a piece
  double p2_peak = 0;         // most during W
  double gradient_bytes = 0;  // of its weights: what data parallelism sums; read with buckets alone
};

// Seconds (or any unit) per micro-batch of one stage, and bytes (or any unit) it holds for one.
struct StageCost {
  double forward = 1;
  double backward_p1 = 1;
  double backward_p2 = 1;
  int p2_units = 1;             // pieces W runs in under `fill`: a rank looks for its message between pieces
  double optimizer = 0;         // seconds per step, after the rank's last instruction
  double activation_bytes = 1;  // held per micro-batch from F until I
  double stash_bytes = 1;       // held per micro-batch from I until W

  // Bytes of a message, per micro-batch: what the link carries, and what the rank holds beside the
  // activations from the receive until its op, and from an op until its send.
  double output_bytes = 0;          // to the next stage
  double input_gradient_bytes = 0;  // to the previous stage
  double gradient_bytes = 0;        // of the stage's weights: what data parallelism sums
  double fixed_bytes = 0;           // parameters, gradients, optimizer state: there all the time

  // The stage's layers in model order. If there are any, then p2_units, activation_bytes and stash_bytes are
  // theirs, the transient peaks within F, I and W count, and room under a byte cap is made layer by layer as
  // the executor does.
  std::vector<LayerShare> layers;
};

}  // namespace twobp
