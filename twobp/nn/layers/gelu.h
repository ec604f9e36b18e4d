// y = gelu(x), elementwise (arXiv 1606.08415): exact or with tanh. Backward-p1 writes dx over dy if no other object
// holds dy.
#pragma once

#include "twobp/nn/kernels/encoder/encoder_kernels.h"
#include "twobp/nn/layer.h"

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

}  // namespace twobp
