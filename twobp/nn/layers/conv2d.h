// Convolution of images (batch, height, width, channels), without bias.
//   p1: dx        p2: dW += ...
#pragma once

#include "twobp/nn/layer.h"
#include "twobp/nn/layers/convolution.h"

namespace twobp {

class Conv2d : public Layer {
 public:
  // `gives_gradient` is false for a model's first layer. Its backward-p1 computes no dx and returns nothing.
  Conv2d(const std::string& name, const ConvolutionOptions& options, at::ScalarType dtype, bool gives_gradient = true)
      : convolution_(name, options, dtype), gives_gradient_(gives_gradient) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  // The same, with dx added to `add_to` (see Convolution::input_gradient).
  Values backward_p1(at::Tensor dy, Saved& saved, at::Tensor add_to);
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  Convolution convolution_;
  bool gives_gradient_;
};

}  // namespace twobp
