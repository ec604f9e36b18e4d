// y = x / sqrt(mean(x^2) + eps) * gain over the last dimension (arXiv 1910.07467, eq. 4). The gain is the weight, or 1
// + weight (Gemma). Backward-p1 computes the weight's gradient in the same pass over x and dy, so no work remains for
// backward-p2.
#pragma once

#include "twobp/nn/layer.h"

namespace twobp {

// The gain of an RMSNorm: its weight, or 1 + its weight.
enum class GainForm : uint8_t { kWeight, kOnePlusWeight };

class RmsGain : public Parameter {
 public:
  // float32 if the layer computes in reduced precision. The gain starts as 1.
  RmsGain(std::string name, int64_t dim, at::ScalarType dtype, GainForm form);

  at::Tensor gain() const { return form_ == GainForm::kWeight ? value : value + 1; }

 private:
  GainForm form_;
};

class RmsNorm : public Layer {
 public:
  RmsNorm(std::string name, int64_t dim, double eps, at::ScalarType dtype, GainForm form = GainForm::kWeight);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  RmsGain gain_;  // (dim)
  at::ScalarType dtype_;
  double eps_;
};

}  // namespace twobp
