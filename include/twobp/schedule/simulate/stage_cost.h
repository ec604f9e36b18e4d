// The cost of one layer and of one stage, for the simulation, the planner and the auto-scheduler.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// The cost of one layer for a micro-batch, or a slice of one: measured, planned with or simulated.
//
// Bytes are relative to those held when the op reaches the layer, its input included. In a StageCost, seconds are
// weights: the stage's own seconds are divided among its layers in this proportion.
struct LayerCost {
  double forward = 0;  // seconds
  double backward_p1 = 0;
  double backward_p2 = 0;
  int p2_units = 0;              // pieces of its W; 0: it has no W
  double forward_peak = 0;       // most during F
  double forward_held = 0;       // after F, its output included, less the input if it was not kept: may be negative
  double p1_peak = 0;            // most during I
  double p1_held = 0;            // after I, dL/dx included: may be negative
  double stash = 0;              // kept for its W, an equal share of it freed by each piece
  double p2_peak = 0;            // most during W
  double output = 0;             // the output itself: it leaves a stage that ends here
  double input_gradient = 0;     // dL/dx itself: it leaves a stage that begins here
  double gradient_bytes = 0;     // of its weights: data parallelism sums them; read only with buckets
  double expert_gradient = 0;    // of these: of experts that e replicas share, with e parts (DataParallel::experts)
  double tied_gradient = 0;      // of these: of weights that other layers use, too, which are never streamed
  double p1_gradient = 0;        // of the others: made in I, and so held from the first I until the last W
  double streamed_gradient = 0;  // the most of the others at once if each is applied when it is complete
  double streamed_unit = 0;      // the piece of W during which they are that much
  double streamed_stash = 0;     // what this piece frees of the stash, which the others share; 0: an equal share

  // Seconds that F, I and W take more for each time the mean that a micro-batch's samples cost beyond the mean
  // (Dataset::cost). 0 if all samples cost the same.
  double forward_rise = 0;
  double backward_p1_rise = 0;
  double backward_p2_rise = 0;

  // Bytes that a replica sends to the others with which it shares the layer's experts, in F and in I: before their
  // work, and after it. Seconds of F that run while the first of these travel; I has as many.
  double forward_to_experts = 0;
  double forward_from_experts = 0;
  double p1_to_experts = 0;
  double p1_from_experts = 0;
  double beside_experts = 0;

  double seconds() const { return forward + backward_p1 + backward_p2; }
  double streamable() const { return gradient_bytes - tied_gradient; }
  // Whether none is applied before the last piece of W.
  bool applies_together() const {
    return p2_units > 0 && streamed_gradient == streamable() && streamed_unit == p2_units - 1;
  }
  // The most that W adds to those made in I.
  double streamed_in_w() const { return std::max(0.0, streamed_gradient - p1_gradient); }
};

// All numbers of a cost but p2_units, for code that treats them alike.
inline constexpr std::array kLayerNumbers = {&LayerCost::forward,
                                             &LayerCost::backward_p1,
                                             &LayerCost::backward_p2,
                                             &LayerCost::forward_peak,
                                             &LayerCost::forward_held,
                                             &LayerCost::p1_peak,
                                             &LayerCost::p1_held,
                                             &LayerCost::stash,
                                             &LayerCost::p2_peak,
                                             &LayerCost::output,
                                             &LayerCost::input_gradient,
                                             &LayerCost::gradient_bytes,
                                             &LayerCost::expert_gradient,
                                             &LayerCost::tied_gradient,
                                             &LayerCost::p1_gradient,
                                             &LayerCost::streamed_gradient,
                                             &LayerCost::streamed_unit,
                                             &LayerCost::streamed_stash,
                                             &LayerCost::forward_rise,
                                             &LayerCost::backward_p1_rise,
                                             &LayerCost::backward_p2_rise,
                                             &LayerCost::forward_to_experts,
                                             &LayerCost::forward_from_experts,
                                             &LayerCost::p1_to_experts,
                                             &LayerCost::p1_from_experts,
                                             &LayerCost::beside_experts};

// Leaves out the backward pass of the first `count` layers of a model. They save nothing, and the output of each
// replaces its input.
void leave_out_backward(std::vector<LayerCost>& costs, int count);

// The largest cost in seconds or bytes, far beyond use. Sums over all ops stay finite.
inline constexpr double kMostCost = 1e18;

// Seconds (or any unit) that one stage takes for a micro-batch, and bytes (or any unit) that it holds for one.
struct StageCost {
  double forward = 1;
  double backward_p1 = 1;
  double backward_p2 = 1;
  int p2_units = 1;             // pieces of W under `fill`: a rank looks for its message between them
  double optimizer = 0;         // seconds per step, after the rank's last instruction
  double activation_bytes = 1;  // held per micro-batch from F until I
  double stash_bytes = 1;       // held per micro-batch from I until W

  // Bytes of a message for one micro-batch. The link carries them. The rank also holds them, in addition to the
  // activations, from the receive to its op, and from an op to its send.
  double output_bytes = 0;          // to the next stage
  double input_gradient_bytes = 0;  // to the previous stage
  double gradient_bytes = 0;        // of the stage's weights: data parallelism sums them
  double fixed_bytes = 0;           // parameters, gradients, optimizer state: held all the time
  double update_bytes = 0;          // that the optimizer takes and frees, when no activations are left

  // The stage's layers in model order. If there are any, they determine p2_units, activation_bytes and stash_bytes, the
  // transient peaks within F, I and W count, and room under a byte cap is made layer by layer, as the executor does.
  std::vector<LayerCost> layers = {};

  // fixed_bytes, less those that streamed gradients free.
  double fixed(bool streams) const;
};

// Bytes of the gradients of a stage with these layers that streams them: what is not held between steps, what the first
// I makes, and the most at once during W.
struct StreamedBytes {
  double freed = 0;
  double in_p1 = 0;
  double most = 0;
};
StreamedBytes streamed_bytes(const std::vector<LayerCost>& layers);

// The cost of a stage with these layers: their sums, and its messages. What layers do not say (optimizer, fixed bytes)
// is left out.
StageCost stage_of(std::vector<LayerCost> layers);

// The costs of each micro-batch, as rows for `simulate`, if their samples cost so many times the mean. `costs` is one
// row, or one for each slice of a micro-batch. Seconds of F, I and W rise with the cost as those of the stage's layers
// do (LayerCost::forward_rise); bytes stay. `costs` itself if
// `times_the_mean` is empty: all cost the same.
std::vector<StageCost> costs_of_micro_batches(const std::vector<StageCost>& costs,
                                              const std::vector<double>& times_the_mean);

// The index of a micro-batch's cost on a stage in a list of rows, each with one entry for each stage. One row holds for
// all micro-batches. Several rows hold for one micro-batch after the other, and repeat. So as many rows as slices give
// each slice its own costs, and as many as micro-batches do so for each micro-batch.
template <typename Cost>
size_t cost_index(const Schedule& schedule, const std::vector<Cost>& costs, int stage, int micro_batch) {
  const auto stages = static_cast<size_t>(schedule.stages);
  return static_cast<size_t>(micro_batch) % (costs.size() / stages) * stages + stage;
}

}  // namespace twobp
