// act = gate(g) * u from packed (..., 2F) = (g | u), the output of the MLP's first projection (arXiv 2002.05202):
// SwiGLU, or GeGLU with another gate. Backward-p1 writes dL/d(g | u) over the saved (g | u) if no other object holds
// it.
#pragma once

#include "twobp/nn/kernels/glu.h"
#include "twobp/nn/layer.h"

namespace twobp {

class GatedUnit : public Layer {
 public:
  explicit GatedUnit(Gate gate) : gate_(gate) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  bool takes_padded_rows() const override { return true; }

 private:
  Gate gate_;
};

}  // namespace twobp
