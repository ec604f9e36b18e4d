// Batch normalization of images (batch, height, width, channels), with a ReLU behind it if wanted. The
// gradients of gain and bias are computed inside backward-p1, in a pass that it makes anyway; the ReLU's mask
// is recomputed from the input. In evaluation the running statistics are used and nothing changes.
#pragma once

#include "twobp/nn/layer.h"
#include "twobp/nn/layers/batch_norm.h"

namespace twobp {

class BatchNorm2d : public Layer {
 public:
  BatchNorm2d(const std::string& name, int64_t channels, bool relu, at::ScalarType dtype)
      : norm_(name, channels, dtype), relu_(relu) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override {
    norm_.collect_parameters(parameters);
  }

 private:
  BatchNorm norm_;
  bool relu_;
};

}  // namespace twobp
