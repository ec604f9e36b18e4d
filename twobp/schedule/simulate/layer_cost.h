// The cost of one layer for a micro-batch, or a slice of one: measured, planned with or simulated.
#pragma once

#include <vector>

namespace twobp {

// Bytes are relative to those held when the op reaches the layer, its input included. In a StageCost, seconds
// are weights: the stage's own seconds are divided among its layers in this proportion.
struct LayerCost {
  double forward = 0;  // seconds
  double backward_p1 = 0;
  double backward_p2 = 0;
  int p2_units = 0;         // pieces of its W; 0: it has no W
  double forward_peak = 0;  // most during F
  double forward_held =
      0;               // after F, its output included, less the input if it was not kept: may be negative
  double p1_peak = 0;  // most during I
  double p1_held = 0;  // after I, dL/dx included: may be negative
  double stash = 0;    // kept for its W, an equal share of it freed by each piece
  double p2_peak = 0;  // most during W
  double output = 0;   // the output itself: it leaves a stage that ends here
  double input_gradient = 0;  // dL/dx itself: it leaves a stage that begins here
  double gradient_bytes = 0;  // of its weights: data parallelism sums them; read only with buckets

  double seconds() const { return forward + backward_p1 + backward_p2; }
};

// Leaves out the backward pass of the first `count` layers of a model. They save nothing, and the output of
// each replaces its input.
void leave_out_backward(std::vector<LayerCost>& costs, int count);

}  // namespace twobp
