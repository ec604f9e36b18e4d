// y = mask * x / (1 - p) as a layer of its own (dropout_rate.h). Both passes write over what they are given, if no
// other object holds it.
#pragma once

#include <string_view>

#include "twobp/nn/context.h"
#include "twobp/nn/kernels/rows/dropout.h"
#include "twobp/nn/layer.h"

namespace twobp {

// Dropout as a part of a layer: y = mask * x / (1 - p), where the mask is 0 with probability p. In evaluation y = x.
// The mask depends on (seed, step, micro-batch, the layer's name) alone. Backward-p1 recomputes it, so nothing is kept.

// The dropout of a layer. Each layer with dropout owns one, with a name that is unique in the model.
class DropoutRate {
 public:
  // Throws Error if `probability` is outside [0, 1).
  DropoutRate(double probability, std::string_view name);

  // Whether numbers are dropped: in training, with a probability above 2^-17.
  bool active(const Context& context) const { return context.training && threshold_ > 0; }
  // The mask of the current micro-batch. Everything is kept if dropout is not active.
  DropoutMask mask(const Context& context) const;

 private:
  uint64_t name_hash_;
  uint32_t threshold_;
};

// y = mask * x, or y = mask * x + add if `add` is defined, for rows [begin, end) of (rows, cols). y may be x. All
// tensors are contiguous.
void dropout_rows(const at::Tensor& x, const at::Tensor& add, const at::Tensor& y, int64_t cols,
                  const DropoutMask& mask, int64_t begin, int64_t end);

class Dropout : public Layer {
 public:
  Dropout(double probability, std::string_view name) : rate_(probability, name) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;

 private:
  DropoutRate rate_;
};

}  // namespace twobp
