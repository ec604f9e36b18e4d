// From a picture to a model's input: crop, resize, flip, normalisation. What is random in it comes from
// (seed, epoch, sample) alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>

namespace twobp {

// Which part of a picture training looks at. Evaluation looks at the centre each time.
enum class Crop : uint8_t {
  kNone,     // the largest square in the centre; the whole picture if it has the wanted shape
  kShift,    // that, moved by up to `padding` pixels each way, what is uncovered black
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
  bool flip = false;  // left to right, every second time in training
  // A channel c of bytes becomes (byte / 255 - mean[c]) / std[c], one of floats (value - mean[c]) / std[c].
  // One value for all channels, or one each; empty: 0 and 1.
  std::vector<double> mean;
  std::vector<double> std;
};

// Where the samples of an epoch are cut out.
struct ImageDraw {
  int64_t top = 0;  // the part of the picture that is scaled to height x width
  int64_t left = 0;
  int64_t height = 0;
  int64_t width = 0;
  int64_t down = 0;  // how far the result shows what lies below and right of that part
  int64_t right = 0;
  bool flip = false;
};

class ImageTransform {
 public:
  // Throws Error: a size, a count of mean or std, or a std that makes no sense.
  explicit ImageTransform(ImageOptions options);

  const ImageOptions& options() const { return options_; }
  int64_t elements() const { return options_.channels * options_.height * options_.width; }

  // For a picture of that size; `epoch` may be kEvaluation.
  ImageDraw draw(int64_t height, int64_t width, uint64_t seed, int64_t epoch, int64_t sample) const;

  // `image` (channels or 1, H, W) uint8 or float32, of any strides; one channel is repeated. Writes
  // (channels, height, width). On the calling thread alone.
  void apply(const at::Tensor& image, const ImageDraw& draw, float* to) const;

 private:
  ImageOptions options_;
  std::vector<float> mean_;     // [channel]
  std::vector<float> inverse_;  // [channel]: 1 / std
};

}  // namespace twobp
