#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/data/images/pixel_array.h"
#include "twobp/files/npy.h"

namespace twobp {
namespace {

// (C, H, W), without a copy if the pictures are in memory.
at::Tensor picture(const PixelArray& array, int64_t index) {
  const int64_t elements = array.channels * array.height * array.width;
  const auto bytes = elements * static_cast<int64_t>(at::elementSize(array.type));
  if (array.file) {
    at::Tensor out = at::empty({array.channels, array.height, array.width}, array.type);
    array.file->visit(index * elements, elements, [&](const auto* pixels) {
      std::memcpy(out.mutable_data_ptr(), pixels, static_cast<size_t>(bytes));
    });
    return out;
  }
  // from_blob takes no const, but nothing here writes.
  auto* first = const_cast<char*>(static_cast<const char*>(array.pixels) + index * bytes);
  return at::from_blob(first, {array.channels, array.height, array.width}, array.type);
}

}  // namespace

std::string classes_advice(int64_t count) {
  return concat("for a new model, set model.classes to ", count,
                "; for model.from, save a copy with as many: in transformers, "
                "AutoModelForImageClassification.from_pretrained(FOLDER, num_labels=",
                count, ", ignore_mismatched_sizes=True).save_pretrained(COPY).");
}

void check_pictures(const PixelArray& array, int64_t channels, int64_t classes) {
  TWOBP_CHECK(array.channels == channels || array.channels == 1, array.path, ": its pictures have ", array.channels,
              " channels, but model.channels is ", channels, ": for a new model, set it to ", array.channels,
              "; for model.from, give pictures of ", channels, channels == 1 ? " channel." : " channels or 1.");
  const auto largest = std::max_element(array.labels.begin(), array.labels.end());
  for (size_t i = 0; i < array.labels.size(); ++i) {
    const int64_t label = array.labels[i];
    TWOBP_CHECK(label >= 0 && label < classes, array.path, ": the label of picture ", i, " is ", label,
                ", but model.classes is ", classes, " (0 to ", classes - 1,
                "): ", label < 0 ? "correct the labels." : "correct the labels, or " + classes_advice(*largest + 1));
  }
  const auto [least, most] = std::minmax_element(array.labels.begin(), array.labels.end());
  TWOBP_CHECK(least != array.labels.end() && *least != *most, array.path, ": all ", array.labels.size(), " labels are ",
              least == array.labels.end() ? 0 : *least,
              ", so there is nothing to classify: give pictures of two classes or more.");
}

PixelStatistics pixel_statistics(const PixelArray& array) {
  constexpr int64_t kMost = 10'000;
  TWOBP_CHECK(array.type == at::kByte && array.count > 0, array.path, ": statistics are taken of bytes alone.");
  const int64_t used = std::min(array.count, kMost);
  const int64_t plane = array.height * array.width;
  std::vector<std::array<int64_t, 256>> by_channel(static_cast<size_t>(array.channels));
  for (int64_t i = 0; i < used; ++i) {
    const at::Tensor pixels = picture(array, i * array.count / used);
    const auto* from = pixels.const_data_ptr<uint8_t>();
    for (auto& counts : by_channel) {
      for (int64_t p = 0; p < plane; ++p) ++counts[*from++];
    }
  }
  PixelStatistics out;
  for (const auto& counts : by_channel) {
    const auto all = static_cast<double>(used * plane);
    double mean = 0;
    double square = 0;
    for (size_t v = 0; v < counts.size(); ++v) {
      const double value = static_cast<double>(v) / 255;
      mean += value * static_cast<double>(counts[v]) / all;
      square += value * value * static_cast<double>(counts[v]) / all;
    }
    const double variance = square - mean * mean;
    out.mean.push_back(mean);
    out.std.push_back(variance > 1e-9 ? std::sqrt(variance) : 1);
  }
  return out;
}

PixelDataset::PixelDataset(PixelArray array, ImageTransform transform, uint64_t seed)
    : array_(std::move(array)), transform_(std::move(transform)), seed_(seed) {}

Fields PixelDataset::read(const std::vector<int64_t>& indices, int64_t epoch) const {
  const auto count = static_cast<int64_t>(indices.size());
  const ImageOptions& options = transform_.options();
  at::Tensor images = at::empty({count, options.channels, options.height, options.width}, at::kFloat);
  at::Tensor labels = at::empty({count}, at::kLong);
  for (int64_t b = 0; b < count; ++b) {
    const int64_t index = indices[static_cast<size_t>(b)];
    TWOBP_CHECK(index >= 0 && index < size(), array_.path, ": no sample ", index, ", there are ", size(), ".");
    float* to = images.data_ptr<float>() + b * transform_.elements();
    transform_.apply(picture(array_, index), transform_.draw(array_.height, array_.width, seed_, epoch, index), to);
    TWOBP_CHECK(array_.type == at::kByte ||
                    std::all_of(to, to + transform_.elements(), [](float v) { return std::isfinite(v); }),
                array_.path, ": picture ", index, " has a value that is not finite: correct or remove it.");
    labels.data_ptr<int64_t>()[b] = array_.labels[static_cast<size_t>(index)];
  }
  return {{"pixel_values", std::move(images)}, {"labels", std::move(labels)}};
}

}  // namespace twobp
