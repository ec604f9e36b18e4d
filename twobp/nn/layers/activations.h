// Activations between matrix products: GELU, alone and with the product after it, and gated units.
#pragma once

#include "twobp/nn/kernels/rows/row_kernels.h"
#include "twobp/nn/kernels/rows/row_operations.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/linear.h"

namespace twobp {

class Gelu : public Layer {
 public:
  explicit Gelu(GeluForm form) : form_(form) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;

 private:
  GeluForm form_;
};

// y = gelu(x) of contiguous tensors of one size; y may be x.
void gelu_into(const at::Tensor& x, at::Tensor& y, GeluForm form);
// dx = dy * gelu'(x); dx may be dy. `act`, if defined, receives gelu(x) and may be x. All tensors are contiguous.
void gelu_backward_into(const at::Tensor& x, const at::Tensor& dy, at::Tensor& dx, at::Tensor& act, GeluForm form);

// y = gelu(x) W^T + b. Only x is kept between forward and backward-p1. Backward-p1 reads x for gelu' and in the same
// pass writes gelu(x) for backward-p2, over x if no other object holds it.
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

// act = gate(g) * u from packed (..., 2F) = (g | u), the output of the MLP's first projection (arXiv 2002.05202):
// SwiGLU, or GeGLU with another gate. Backward-p1 writes dL/d(g | u) over the saved (g | u) if no other object holds
// it.
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
