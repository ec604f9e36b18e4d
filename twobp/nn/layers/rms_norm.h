// y = x / sqrt(mean(x^2) + eps) * gain over the last dimension (arXiv 1910.07467, eq. 4). Backward-p1
// computes the gain's gradient in the same pass over x and dy, so no work remains for backward-p2.
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
  Parameter gain_;  // (dim), float32 if the layer computes in reduced precision
  at::ScalarType dtype_;
  double eps_;
};

}  // namespace twobp
