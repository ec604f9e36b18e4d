#include "twobp/data/image_transform.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <c10/util/ParallelGuard.h>

#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/core/text.h"
#include "twobp/data/data.h"

namespace twobp {
namespace {

constexpr uint64_t kCropStream = 0x696d616765;  // distinguishes these draws from others with the same seed

// A number in [0, 1).
double uniform(SplitMix64& random) {
  return static_cast<double>(random() >> 11) * 0x1p-53;
}

void place(ImageDraw& draw, int64_t top, int64_t left, int64_t height, int64_t width) {
  draw.top = top;
  draw.left = left;
  draw.height = height;
  draw.width = width;
}

// The largest centred part with the result's proportions, reduced by the factor `part`.
void centre(ImageDraw& draw, int64_t height, int64_t width, const ImageOptions& options, double part) {
  const auto h = static_cast<double>(height);
  const auto w = static_cast<double>(width);
  const double proportion = static_cast<double>(options.width) / static_cast<double>(options.height);
  const double tall = std::min(h, w / proportion) * part;
  const int64_t rows = std::clamp<int64_t>(std::llround(tall), 1, height);
  const int64_t columns = std::clamp<int64_t>(std::llround(tall * proportion), 1, width);
  place(draw, (height - rows) / 2, (width - columns) / 2, rows, columns);
}

// As in torchvision.transforms.RandomResizedCrop: ten tries, then the centre.
void random_part(ImageDraw& draw, int64_t height, int64_t width, SplitMix64& random, const ImageOptions& options) {
  constexpr double kLeastArea = 0.08;
  constexpr double kNarrowest = 0.75;
  constexpr int kTries = 10;
  const double area = static_cast<double>(height) * static_cast<double>(width);
  for (int i = 0; i < kTries; ++i) {
    const double wanted = area * (kLeastArea + (1 - kLeastArea) * uniform(random));
    const double ratio = kNarrowest * std::pow(1 / (kNarrowest * kNarrowest), uniform(random));  // log-uniform
    const int64_t columns = std::llround(std::sqrt(wanted * ratio));
    const int64_t rows = std::llround(std::sqrt(wanted / ratio));
    if (rows < 1 || columns < 1 || rows > height || columns > width) continue;
    const auto top = static_cast<int64_t>(bounded(random, static_cast<uint64_t>(height - rows + 1)));
    const auto left = static_cast<int64_t>(bounded(random, static_cast<uint64_t>(width - columns + 1)));
    place(draw, top, left, rows, columns);
    return;
  }
  centre(draw, height, width, options, 1);
}

std::vector<float> per_channel(const std::vector<double>& values, const ImageOptions& options, double otherwise,
                               const char* key) {
  const auto channels = static_cast<size_t>(options.channels);
  TWOBP_CHECK(values.empty() || values.size() == 1 || values.size() == channels, key, " lists ", values.size(),
              " values, but pictures have ", channels, " channels: give one value for each, or one for all.");
  std::vector<float> out(channels, static_cast<float>(otherwise));
  for (size_t c = 0; c < channels && !values.empty(); ++c) {
    const double value = values[values.size() == 1 ? 0 : c];
    TWOBP_CHECK(std::isfinite(value), key, " has ", value, " in it: give finite numbers.");
    out[c] = static_cast<float>(value);
  }
  return out;
}

// Writes one channel. Pixels outside the picture become `outside`. `value` converts a pixel to float.
template <typename Pixel, typename Value>
void write_channel(const Pixel* from, int64_t row_stride, int64_t column_stride, const ImageOptions& options,
                   const ImageDraw& draw, float outside, Value&& value, float* to) {
  for (int64_t y = 0; y < options.height; ++y, to += options.width) {
    const int64_t row = y + draw.down;
    if (row < 0 || row >= options.height) {
      std::fill_n(to, options.width, outside);
      continue;
    }
    const Pixel* pixels = from + row * row_stride;
    const int64_t begin = std::clamp<int64_t>(-draw.right, 0, options.width);
    const int64_t end = std::clamp<int64_t>(options.width - draw.right, begin, options.width);
    std::fill_n(to, begin, outside);
    for (int64_t x = begin; x < end; ++x) to[x] = value(pixels[(x + draw.right) * column_stride]);
    std::fill(to + end, to + options.width, outside);
    if (draw.flip) std::reverse(to, to + options.width);
  }
}

}  // namespace

Crop parse_crop(const std::string& name) {
  if (name == "none") return Crop::kNone;
  if (name == "shift") return Crop::kShift;
  if (name == "resized") return Crop::kResized;
  fail("data.crop is \"", name, "\", which is unknown: did you mean \"", nearest(name, {"none", "shift", "resized"}),
       "\"?");
}

ImageTransform::ImageTransform(ImageOptions options) : options_(std::move(options)) {
  TWOBP_CHECK(options_.height >= 1 && options_.width >= 1, "data.image_size: pictures of ", options_.width, " x ",
              options_.height, " pixels have no pixel.");
  TWOBP_CHECK(options_.channels >= 1, "model.channels is ", options_.channels, ", but must be at least 1.");
  TWOBP_CHECK(options_.padding >= 0, "data.padding is ", options_.padding, ", but must be at least 0.");
  mean_ = per_channel(options_.mean, options_, 0, "data.mean");
  inverse_ = per_channel(options_.std, options_, 1, "data.std");
  for (float& value : inverse_) {
    TWOBP_CHECK(value > 0, "data.std has ", value, " in it, but pixels are divided by it: give numbers above 0.");
    value = 1 / value;
  }
}

ImageDraw ImageTransform::draw(int64_t height, int64_t width, uint64_t seed, int64_t epoch, int64_t sample) const {
  SplitMix64 random(
      mix_bits(mix_bits(mix_bits(seed, kCropStream), static_cast<uint64_t>(epoch)), static_cast<uint64_t>(sample)));
  const bool training = epoch != kEvaluation;
  ImageDraw draw;
  if (options_.crop == Crop::kResized && training) {
    random_part(draw, height, width, random, options_);
  } else {
    centre(draw, height, width, options_, options_.crop == Crop::kResized ? 0.875 : 1);
  }
  if (options_.crop == Crop::kShift && training) {
    const auto moves = static_cast<uint64_t>(2 * options_.padding + 1);
    draw.down = static_cast<int64_t>(bounded(random, moves)) - options_.padding;
    draw.right = static_cast<int64_t>(bounded(random, moves)) - options_.padding;
  }
  draw.flip = options_.flip && training && (random() >> 63) != 0;
  return draw;
}

void ImageTransform::apply(const at::Tensor& image, const ImageDraw& draw, float* to) const {
  TWOBP_CHECK(image.dim() == 3 && (image.size(0) == options_.channels || image.size(0) == 1), "a picture has ",
              image.size(0), " channels, but must have ", options_.channels, " or 1.");
  at::Tensor part = image.narrow(1, draw.top, draw.height).narrow(2, draw.left, draw.width);
  if (draw.height != options_.height || draw.width != options_.width) {
    const c10::ParallelGuard one_thread(true);
    part = at::_upsample_bilinear2d_aa(part.unsqueeze(0), {options_.height, options_.width},
                                       /*align_corners=*/false)
               .squeeze(0);
  }
  const int64_t plane = options_.height * options_.width;
  for (int64_t c = 0; c < options_.channels; ++c, to += plane) {
    const float mean = mean_[static_cast<size_t>(c)];
    const float inverse = inverse_[static_cast<size_t>(c)];
    const at::Tensor channel = part.select(0, part.size(0) == 1 ? 0 : c);
    if (channel.scalar_type() == at::kByte) {
      std::array<float, 256> values{};
      for (size_t v = 0; v < values.size(); ++v) values[v] = (static_cast<float>(v) / 255 - mean) * inverse;
      write_channel(
          channel.const_data_ptr<uint8_t>(), channel.stride(0), channel.stride(1), options_, draw, values[0],
          [&](uint8_t pixel) { return values[pixel]; }, to);
    } else {
      write_channel(
          channel.const_data_ptr<float>(), channel.stride(0), channel.stride(1), options_, draw, -mean * inverse,
          [&](float pixel) { return (pixel - mean) * inverse; }, to);
    }
  }
}

}  // namespace twobp
