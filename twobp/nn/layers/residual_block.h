// A ResNet's block (arXiv 1512.03385): y = max(0, norm(conv(... max(0, norm(conv(x))))) + shortcut(x)). The shortcut is
// x itself, or norm(conv(x)) if the block changes the size or the number of channels. Every convolution hands out its W
// separately. The block keeps:
//   until p1: the last convolution's output and, with a projection, the projection's output. The gradients
//   then overwrite them.
//   until p2: x, and the input and output gradient of each convolution. (Until p1, the tensor from which the
//   input is normalized is kept instead of the input.)
// The ReLUs' masks and the sums are recomputed from these tensors.
#pragma once

#include <memory>
#include <vector>

#include "twobp/nn/layer.h"
#include "twobp/nn/layers/batch_norm.h"
#include "twobp/nn/layers/convolution.h"

namespace twobp {

// A convolution of max(0, norm(x)). Batch norm, ReLU and convolution are one layer, so that the convolution's input
// need not be kept between forward and backward-p1. Backward-p1 recomputes that input from x and writes it over x, in a
// pass that reads x anyway.
//   p1: dx, gain's and bias's gradients        p2: dW += ...
class BatchNormReluConv2d : public Layer {
 public:
  BatchNormReluConv2d(const std::string& norm, const std::string& convolution, const ConvolutionOptions& options,
                      at::ScalarType dtype)
      : norm_(norm, options.in, dtype), convolution_(convolution, options, dtype) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void backward_p2(std::span<Saved* const> saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  bool p2_reads_other_weights() const override { return false; }
  // Appends the norm's parameters, then the convolution's.
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  BatchNormRows norm_;
  Convolution convolution_;
};

struct ResidualBlockOptions {
  int64_t in = 64, out = 64;  // channels
  int64_t stride = 1;         // stride of the first 3 x 3 convolution
  bool bottleneck = true;     // 1 x 1 to a quarter of `out`, 3 x 3, 1 x 1; false: two of 3 x 3
  bool projects() const { return in != out || stride != 1; }
};

class ResidualBlock : public Layer {
 public:
  // The names are Hugging Face's after `name`: .layer.0.convolution.weight, .shortcut.normalization.bias, ...
  ResidualBlock(const std::string& name, const ResidualBlockOptions& options, at::ScalarType dtype);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override;
  // Appends the shortcut's parameters first, as in Hugging Face's modules.
  void collect_parameters(std::vector<Parameter*>& parameters) override;

 private:
  struct Projection {
    Conv2d convolution;
    BatchNormRows norm;
  };
  // Saved's children are the convolutions in order, then the projection.
  size_t projection_child() const { return 1 + inner_.size(); }

  Conv2d first_;
  std::vector<std::unique_ptr<BatchNormReluConv2d>> inner_;
  BatchNormRows last_;
  std::unique_ptr<Projection> projection_;  // null: the shortcut is x
};

}  // namespace twobp
