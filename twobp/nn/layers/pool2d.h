// Pooling of images (batch, height, width, channels): the largest number under a moving window, and the mean of the
// whole image.
#pragma once

#include "twobp/nn/kernels/image/image_kernels.h"
#include "twobp/nn/layer.h"

namespace twobp {

// (B, H, W, C) -> (B, H', W', C). Keeps one byte per output number: the index of the largest pixel within its window.
class MaxPool2d : public Layer {
 public:
  // The window has at most 15 x 15 pixels. The padding is at most half of that, as in PyTorch.
  MaxPool2d(int64_t kernel, int64_t stride, int64_t padding);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;

 private:
  WindowShape window_;  // its image size is not set
};

// (B, H, W, C) -> (B, C): adaptive average pooling to one pixel.
class AveragePool2d : public Layer {
 public:
  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
};

// The first layer of an image model. Takes pixel_values (B, C, H, W), or (B, H, W) of one channel. Returns them in the
// dtype and the layout of the other layers, (B, H, W, C). Has no backward pass.
class ImageInput : public Layer {
 public:
  ImageInput(int64_t channels, at::ScalarType dtype) : channels_(channels), dtype_(dtype) {}

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values, Context&, Saved&) override { return {}; }

 private:
  int64_t channels_;
  at::ScalarType dtype_;
};

}  // namespace twobp
