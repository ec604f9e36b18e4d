// y = gelu(x) W^T + b. Only x is kept between forward and backward-p1. Backward-p1 reads x for gelu' and in the same
// pass writes gelu(x) for backward-p2, over x if no other object holds it.
#pragma once

#include "twobp/nn/layers/gelu.h"
#include "twobp/nn/layers/linear.h"

namespace twobp {

class GeluLinear : public Layer {
 public:
  // The parameters are those of Linear.
  GeluLinear(GeluForm form, std::vector<ParameterPart> parts, int64_t in, double init_std, at::ScalarType dtype,
             bool bias, bool transposed = false)
      : form_(form), linear_(std::move(parts), in, init_std, dtype, bias, transposed) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  GeluForm form_;
  Linear linear_;
};

}  // namespace twobp
