// Dropout as part of a layer: y = mask * x / (1 - p), mask 0 with probability p; in evaluation y = x. The
// mask depends on (seed, step, micro-batch, the layer's name) alone; backward-p1 makes it again, so nothing
// is kept.
#pragma once

#include <string_view>

#include "twobp/nn/context.h"
#include "twobp/nn/kernels/encoder/dropout.h"

namespace twobp {

// A layer's dropout: whatever layer drops something has one, with a name of its own in the model.
class DropoutRate {
 public:
  // Throws Error: `probability` outside [0, 1).
  DropoutRate(double probability, std::string_view name);

  // Whether something is dropped: training, and a probability above 2^-17.
  bool active(const Context& context) const { return context.training && threshold_ > 0; }
  // The mask of the micro-batch at hand; all is kept if not active.
  DropoutMask mask(const Context& context) const;

 private:
  uint64_t name_hash_;
  uint32_t threshold_;
};

// y = mask * x, or y = mask * x + add, for rows [begin, end) of (rows, cols); y may be x. `add` may be
// undefined. All contiguous.
void dropout_rows(const at::Tensor& x, const at::Tensor& add, const at::Tensor& y, int64_t cols,
                  const DropoutMask& mask, int64_t begin, int64_t end);

}  // namespace twobp
