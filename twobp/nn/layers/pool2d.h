// Pooling of images (batch, height, width, channels): the largest number under a window that moves over the
// image, and the mean of the whole image.
#pragma once

#include "twobp/nn/kernels/image/image_kernels.h"
#include "twobp/nn/layer.h"

namespace twobp {

// (B, H, W, C) -> (B, H', W', C). Keeps one byte per output: which pixel of the window was the largest.
class MaxPool2d : public Layer {
 public:
  // At most 15 x 15 pixels; padding at most half of that, as in PyTorch.
  MaxPool2d(int64_t kernel, int64_t stride, int64_t padding);

  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;

 private:
  WindowShape window_;  // of no image yet
};

// (B, H, W, C) -> (B, C): adaptive average pooling to one pixel.
class AveragePool2d : public Layer {
 public:
  Values forward(Values x, Context& context, Saved& saved) override;
  Values backward_p1(Values dy, Context& context, Saved& saved) override;
};

// What a model of images begins with: pixel_values (B, C, H, W), or (B, H, W) of one channel, as the dtype
// and in the order that the layers compute with, (B, H, W, C). Has no backward.
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
