// A convolution of max(0, norm(x)). Batch norm, ReLU and convolution are one layer, so that the convolution's input
// need not be kept between forward and backward-p1. Backward-p1 recomputes that input from x and writes it over x, in a
// pass that reads x anyway.
//   p1: dx, gain's and bias's gradients        p2: dW += ...
#pragma once

#include "twobp/nn/layer.h"
#include "twobp/nn/layers/batch_norm.h"
#include "twobp/nn/layers/convolution.h"

namespace twobp {

class BatchNormReluConv2d : public Layer {
 public:
  BatchNormReluConv2d(const std::string& norm, const std::string& convolution, const ConvolutionOptions& options,
                      at::ScalarType dtype)
      : norm_(norm, options.in, dtype), convolution_(convolution, options, dtype) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  // Appends the norm's parameters, then the convolution's.
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  BatchNormRows norm_;
  Convolution convolution_;
};

}  // namespace twobp
