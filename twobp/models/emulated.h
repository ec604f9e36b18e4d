// A model whose layers wait instead of computing, and hold bytes instead of values: to study schedules on the
// real executor and transport with more ranks than there are cores.
#pragma once

#include <vector>

#include "twobp/models/model.h"

namespace twobp {

struct EmulatedLayer {
  double forward = 0;  // seconds per micro-batch
  double backward_p1 = 0;
  double backward_p2 = 0;
  int64_t activation_bytes = 0;  // held from F until I
  int64_t stash_bytes = 0;       // held from I until W; of the activations, as much as there is
  int64_t boundary_bytes = 4;    // of its output and of dL/d(output)
  int64_t gradient_bytes = 0;    // of a weight that it does not use and whose gradient is zero

  bool operator==(const EmulatedLayer&) const = default;
};

// Layers of equal numbers are of one kind. Without input; the loss is 0. Throws Error for no layer and for
// negative numbers.
ModelSpec emulated(const std::vector<EmulatedLayer>& layers);

}  // namespace twobp
