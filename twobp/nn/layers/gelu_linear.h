// y = gelu(x) W^T + b. Between forward and backward-p1 only x is kept: p1, which reads x for gelu', writes
// gelu(x) for backward-p2 in the same pass, over x where nobody else holds it.
#pragma once

#include "twobp/nn/layers/gelu.h"
#include "twobp/nn/layers/linear.h"

namespace twobp {

class GeluLinear : public Layer {
 public:
  // Parameters as Linear has them.
  GeluLinear(GeluForm form, std::vector<ParameterPart> parts, int64_t in, double init_std,
             at::ScalarType dtype, bool bias)
      : form_(form), linear_(std::move(parts), in, init_std, dtype, bias) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  GeluForm form_;
  Linear linear_;
};

}  // namespace twobp
