// ResNet (arXiv 1512.03385) of 18 to 152 layers and any other depth: a stem, residual blocks, and a classifier with its
// loss. Each block is a layer of the model. Reads `pixel_values` (B, channels, H, W) and `labels` (B) int64. Parameter
// names are those of Hugging Face's ResNetForImageClassification; torchvision's are accepted too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/models/model_type.h"

namespace twobp {

struct ResnetOptions {
  static constexpr const char* kType = "resnet";

  int64_t classes = 1000;
  int64_t channels = 3;  // of the pictures
  int64_t stem = 64;     // channels of the first convolution
  // false: the first convolution is 7 x 7 with stride 2 and max pooling, which reduces height and width to a quarter.
  // true: it is 3 x 3 with stride 1, for pictures of 28 or 32 pixels.
  bool small_images = false;
  std::string block = "bottleneck";        // bottleneck, basic
  std::vector<int> depths = {3, 4, 6, 3};  // blocks of each stage; every stage but the first halves height and width
  std::vector<int> widths;                 // channels of each stage; empty: as in the paper
};

// Throws Error if there is no stage, the numbers of widths and depths differ, a count is below 1, or a bottleneck's
// width is no multiple of 4.
ModelSpec resnet(const ResnetOptions& options, const BuildSettings& settings = {});

ModelType resnet_type();

}  // namespace twobp
