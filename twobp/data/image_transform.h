// Turns a picture into a model's input: crop, resize, flip, normalization. Random choices depend on (seed,
// epoch, sample) alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>

namespace twobp {

// The part of a picture that training uses. Evaluation always uses the centre.
enum class Crop : uint8_t {
  kNone,     // the largest square in the centre; the whole picture if it has the right shape
  kShift,    // as kNone, moved by up to `padding` pixels each way; uncovered pixels are black
  kResized,  // 8 % to 100 % of the area, sides 3:4 to 4:3, anywhere (Szegedy et al., arXiv 1409.4842);
             // evaluation: the inner 7/8 of the largest square in the centre
};
Crop parse_crop(const std::string& name);  // "none", "shift", "resized"; throws Error otherwise

struct ImageOptions {
  int64_t channels = 3;
  int64_t height = 224;  // of the result
  int64_t width = 224;
  Crop crop = Crop::kNone;
  int64_t padding = 4;
  bool flip = false;  // in training, mirrors pictures left to right with probability 1/2
  // A channel c of bytes becomes (byte / 255 - mean[c]) / std[c]; a channel of floats becomes (value -
  // mean[c]) / std[c]. Each has one value for all channels, or one per channel. Empty means 0 and 1.
  std::vector<double> mean;
  std::vector<double> std;
};

// The crop of a sample in an epoch.
struct ImageDraw {
  int64_t top = 0;  // the part of the picture that is scaled to height x width
  int64_t left = 0;
  int64_t height = 0;
  int64_t width = 0;
  int64_t down = 0;  // offset of the result towards the bottom and right of that part
  int64_t right = 0;
  bool flip = false;
};

class ImageTransform {
 public:
  // Throws Error for an invalid size, std, or number of values of mean or std.
  explicit ImageTransform(ImageOptions options);

  const ImageOptions& options() const { return options_; }
  int64_t elements() const { return options_.channels * options_.height * options_.width; }

  // Draws for a picture of this size. `epoch` may be kEvaluation.
  ImageDraw draw(int64_t height, int64_t width, uint64_t seed, int64_t epoch, int64_t sample) const;

  // `image` (channels or 1, H, W) is uint8 or float32, of any strides. A single channel is repeated. Writes
  // (channels, height, width). Uses only the calling thread.
  void apply(const at::Tensor& image, const ImageDraw& draw, float* to) const;

 private:
  ImageOptions options_;
  std::vector<float> mean_;     // [channel]
  std::vector<float> inverse_;  // [channel]: 1 / std
};

}  // namespace twobp
