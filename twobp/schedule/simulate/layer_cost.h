// The cost of one layer for a micro-batch, or a slice of one: measured, planned with or simulated.
#pragma once

#include <array>
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

  // Seconds that F, I and W take more for each time the mean that a micro-batch's samples cost beyond the
  // mean (Dataset::cost). 0 if all samples cost the same.
  double forward_rise = 0;
  double backward_p1_rise = 0;
  double backward_p2_rise = 0;

  double seconds() const { return forward + backward_p1 + backward_p2; }
};

// All numbers of a cost but p2_units, for code that treats them alike.
inline constexpr std::array kLayerNumbers = {&LayerCost::forward,         &LayerCost::backward_p1,
                                             &LayerCost::backward_p2,     &LayerCost::forward_peak,
                                             &LayerCost::forward_held,    &LayerCost::p1_peak,
                                             &LayerCost::p1_held,         &LayerCost::stash,
                                             &LayerCost::p2_peak,         &LayerCost::output,
                                             &LayerCost::input_gradient,  &LayerCost::gradient_bytes,
                                             &LayerCost::forward_rise,    &LayerCost::backward_p1_rise,
                                             &LayerCost::backward_p2_rise};

// Leaves out the backward pass of the first `count` layers of a model. They save nothing, and the output of
// each replaces its input.
void leave_out_backward(std::vector<LayerCost>& costs, int count);

}  // namespace twobp
