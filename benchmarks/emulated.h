// A model whose layers wait instead of computing, and hold bytes instead of values. It serves to study schedules on the
// real executor and transport with more ranks than cores.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/models/model.h"

namespace twobp {

struct EmulatedLayer {
  double forward = 0;  // seconds per micro-batch
  double backward_p1 = 0;
  double backward_p2 = 0;
  int64_t activation_bytes = 0;  // held from F until I
  int64_t stash_bytes = 0;       // held from I until W; part of the activations as far as these suffice
  int64_t boundary_bytes = 4;    // size of its output and of dL/d(output)
  int64_t gradient_bytes = 0;    // size of a weight that it does not use; its gradient is zero
  int64_t exchange_bytes = 0;    // sent to each other replica before and after F and I, as experts do
  int replicas = 2;              // that exchange

  bool operator==(const EmulatedLayer&) const = default;
};

// Layers with equal numbers are of one kind. The model has no input, and the loss is 0. Throws Error for no layer and
// for negative numbers.
ModelSpec emulated(const std::vector<EmulatedLayer>& layers);

}  // namespace twobp
