// ResNet (arXiv 1512.03385) of 18 to 152 layers and any other depth: a stem, residual blocks, each a layer of
// the model, and a classifier with its loss. Reads `pixel_values` (B, channels, H, W) and `labels` (B) int64.
// Parameter names are those of Hugging Face's ResNetForImageClassification.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/models/model.h"

namespace twobp {

struct ResnetOptions {
  int64_t channels = 3;  // of the images
  int64_t classes = 1000;
  int64_t stem = 64;  // channels
  // false: a 7 x 7 convolution with stride 2 and max pooling, which leave a quarter of the height and width;
  // true: a 3 x 3 convolution with stride 1, for images of 28 or 32 pixels.
  bool small_images = false;
  std::vector<int64_t> widths = {256, 512, 1024, 2048};  // channels of each stage; the first keeps the size,
                                                         // every other halves it
  std::vector<int64_t> depths = {3, 4, 6, 3};            // blocks
  bool bottleneck = true;                                // false: basic blocks
  at::ScalarType dtype = at::kFloat;
};

// Throws Error: no stage, as many widths as depths are not given, a count below 1, a bottleneck's width that
// is no multiple of 4.
ModelSpec resnet(const ResnetOptions& options);

}  // namespace twobp
