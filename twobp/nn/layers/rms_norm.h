// y = x / sqrt(mean(x^2) + eps) * gain over the last dimension (arXiv 1910.07467, eq. 4). The gain's gradient
// is computed inside backward-p1, in the same pass over x and dy: nothing is left for backward-p2.
#pragma once

#include "twobp/nn/layer.h"

namespace twobp {

class RmsNorm : public Layer {
 public:
  RmsNorm(std::string name, int64_t dim, double eps, at::ScalarType dtype);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  // dx by our kernels; gives dL/dgain.
  at::Tensor backward_rows(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd,
                           at::Tensor& dx) const;

  Parameter gain_;  // (dim), float32 where the layer computes in reduced precision
  at::ScalarType dtype_;
  double eps_;
};

}  // namespace twobp
