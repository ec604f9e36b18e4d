#include "twobp/data/pixel_dataset.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/array_dataset.h"
#include "twobp/data/synthetic_dataset.h"

namespace twobp {
namespace {

// (C, H, W)
at::Tensor picture(const PixelArray& array, int64_t index) {
  at::Tensor out = at::empty({array.size(1), array.size(2), array.size(3)}, array.bytes() ? at::kByte : at::kFloat);
  array.pixels->visit(index * out.numel(), out.numel(), [&](const auto* pixels) {
    std::memcpy(out.mutable_data_ptr(), pixels, static_cast<size_t>(out.nbytes()));
  });
  return out;
}

// Advice for a message that the data has `count` classes and the model another number.
std::string classes_advice(int64_t count) {
  return concat("for a new model, set model.classes to ", count,
                "; for model.from, save a copy with as many: in transformers, "
                "AutoModelForImageClassification.from_pretrained(FOLDER, num_labels=",
                count, ", ignore_mismatched_sizes=True).save_pretrained(COPY).");
}

// Some samples of another dataset.
class Subset : public Dataset {
 public:
  // Sample i is sample indices[i] of `whole`.
  Subset(std::shared_ptr<const Dataset> whole, std::vector<int64_t> indices)
      : whole_(std::move(whole)), indices_(std::move(indices)) {}

  int64_t size() const override { return static_cast<int64_t>(indices_.size()); }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override {
    std::vector<int64_t> of_whole;
    of_whole.reserve(indices.size());
    for (const int64_t index : indices) {
      TWOBP_CHECK(index >= 0 && index < size(), "data: no sample ", index, ", there are ", size(), ".");
      of_whole.push_back(indices_[static_cast<size_t>(index)]);
    }
    return whole_->read(of_whole, epoch);
  }
  int64_t cost(int64_t sample) const override { return whole_->cost(indices_[static_cast<size_t>(sample)]); }

 private:
  std::shared_ptr<const Dataset> whole_;
  std::vector<int64_t> indices_;
};

// The transform for `train`. `held_out` must use the same one.
ImageTransform transform_of(const PixelArray& train, const DataConfig& data, const ModelInput& model) {
  ImageOptions options;
  options.channels = model.channels;
  options.height = data.image_size > 0 ? data.image_size : train.size(2);
  options.width = data.image_size > 0 ? data.image_size : train.size(3);
  options.crop = data.crop.empty() ? Crop::kNone : parse_crop(data.crop);
  options.padding = data.padding;
  options.flip = data.flip;
  options.mean = data.mean;
  options.std = data.std;
  if (train.bytes() && (data.mean.empty() || data.std.empty())) {
    const PixelStatistics measured = pixel_statistics(train);
    if (data.mean.empty()) options.mean = measured.mean;
    if (data.std.empty()) options.std = measured.std;
  }
  return ImageTransform(options);
}

DataSplit open_synthetic(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  constexpr int64_t kUsualSize = 224;
  const int64_t size = data.image_size > 0 ? data.image_size : kUsualSize;
  const auto images = synthetic_images(kSyntheticSamples, model.channels, size, model.classes, seed);
  return hold_out_by_class(images, std::vector<int64_t>(kSyntheticSamples), data.held_out, seed);
}

}  // namespace

PixelArray read_pixel_arrays(const std::string& folder) {
  const auto pixels = std::make_shared<const NpyArray>(std::filesystem::path(folder) / "pixel_values.npy");
  const NpyArray labels(std::filesystem::path(folder) / "labels.npy");
  const auto& shape = pixels->shape();
  TWOBP_CHECK(pixels->type() == NpyType::kUInt8 || pixels->type() == NpyType::kFloat32, pixels->path(), ": holds ",
              npy_type_name(pixels->type()), ", but pictures are uint8 (0 to 255) or float32: convert it.");
  TWOBP_CHECK(shape.size() == 4, pixels->path(), ": shape ", shape_text(shape),
              ", but four dimensions are expected: (pictures, channels, height, width).");
  TWOBP_CHECK(pixels->elements() > 0, pixels->path(), ": shape ", shape_text(shape), ": there is no picture in it.");
  TWOBP_CHECK(labels.type() != NpyType::kFloat32, labels.path(),
              ": holds float32, but labels are class numbers: save it as int64.");
  TWOBP_CHECK(labels.shape().size() == 1 && labels.shape()[0] == shape[0], labels.path(), ": shape ",
              shape_text(labels.shape()), ", but pixel_values.npy has ", shape_text(shape),
              ": every picture needs one label, so (", shape[0], ",) is expected.");
  refuse_other_arrays(folder, {"pixel_values", "labels"}, "a model of pictures");
  PixelArray out{pixels, {}};
  labels.visit(0, labels.elements(), [&](const auto* first) { out.labels.assign(first, first + labels.elements()); });
  return out;
}

void check_pictures(const PixelArray& array, int64_t channels, int64_t classes) {
  TWOBP_CHECK(array.size(1) == channels || array.size(1) == 1, array.pixels->path(), ": its pictures have ",
              array.size(1), " channels, but model.channels is ", channels, ": for a new model, set it to ",
              array.size(1), "; for model.from, give pictures of ", channels,
              channels == 1 ? " channel." : " channels or 1.");
  const auto largest = std::max_element(array.labels.begin(), array.labels.end());
  for (size_t i = 0; i < array.labels.size(); ++i) {
    const int64_t label = array.labels[i];
    TWOBP_CHECK(label >= 0 && label < classes, array.pixels->path(), ": the label of picture ", i, " is ", label,
                ", but model.classes is ", classes, " (0 to ", classes - 1,
                "): ", label < 0 ? "correct the labels." : "correct the labels, or " + classes_advice(*largest + 1));
  }
  const auto [least, most] = std::minmax_element(array.labels.begin(), array.labels.end());
  TWOBP_CHECK(least != array.labels.end() && *least != *most, array.pixels->path(), ": all ", array.labels.size(),
              " labels are ", least == array.labels.end() ? 0 : *least,
              ", so there is nothing to classify: give pictures of two classes or more.");
}

PixelStatistics pixel_statistics(const PixelArray& array) {
  constexpr int64_t kMost = 10'000;
  TWOBP_CHECK(array.bytes(), array.pixels->path(), ": statistics are taken of bytes alone.");
  const int64_t used = std::min(array.size(0), kMost);
  const int64_t plane = array.size(2) * array.size(3);
  std::vector<std::array<int64_t, 256>> by_channel(static_cast<size_t>(array.size(1)));
  for (int64_t i = 0; i < used; ++i) {
    const at::Tensor pixels = picture(array, i * array.size(0) / used);
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
    TWOBP_CHECK(index >= 0 && index < size(), array_.pixels->path(), ": no sample ", index, ", there are ", size(),
                ".");
    float* to = images.data_ptr<float>() + b * transform_.elements();
    transform_.apply(picture(array_, index), transform_.draw(array_.size(2), array_.size(3), seed_, epoch, index), to);
    TWOBP_CHECK(array_.bytes() || std::all_of(to, to + transform_.elements(), [](float v) { return std::isfinite(v); }),
                array_.pixels->path(), ": picture ", index, " has a value that is not finite: correct or remove it.");
    labels.data_ptr<int64_t>()[b] = array_.labels[static_cast<size_t>(index)];
  }
  return {{"pixel_values", std::move(images)}, {"labels", std::move(labels)}};
}

DataSplit hold_out_by_class(std::shared_ptr<Dataset> whole, const std::vector<int64_t>& labels, double fraction,
                            uint64_t seed) {
  if (fraction == 0) return {std::move(whole), nullptr};
  std::map<int64_t, std::vector<int64_t>> classes;
  for (size_t i = 0; i < labels.size(); ++i) classes[labels[i]].push_back(static_cast<int64_t>(i));
  const auto largest = std::max_element(classes.begin(), classes.end(),
                                        [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  TWOBP_CHECK(largest != classes.end() && largest->second.size() >= 2,
              "data: no class has two samples, so data.held_out (", fraction,
              ") would leave none for training: set data.held_out to 0, or give more data.");
  std::vector<int64_t> train;
  std::vector<int64_t> held_out;
  double owed = 0;  // carries the rounding, so that the sum over the classes is right
  for (auto entry = classes.begin(); entry != classes.end(); ++entry) {
    const auto& samples = entry->second;
    const auto size = static_cast<int64_t>(samples.size());
    owed += fraction * static_cast<double>(size);
    const int64_t taken = std::clamp<int64_t>(std::llround(owed), 0, size - 1);
    owed -= static_cast<double>(taken);
    const std::vector<int64_t> order = epoch_order(size, /*shuffle=*/true, seed, entry->first);
    for (int64_t i = 0; i < size; ++i) {
      (i < taken ? held_out : train).push_back(samples[static_cast<size_t>(order[static_cast<size_t>(i)])]);
    }
  }
  std::sort(train.begin(), train.end());
  if (held_out.empty()) {
    held_out.push_back(largest->second.back());
    train.erase(std::find(train.begin(), train.end(), held_out.front()));
  }
  std::vector<int64_t> shuffled;
  for (const int64_t i : epoch_order(static_cast<int64_t>(held_out.size()), /*shuffle=*/true, seed, -1)) {
    shuffled.push_back(held_out[static_cast<size_t>(i)]);
  }
  return {std::make_shared<Subset>(whole, std::move(train)), std::make_shared<Subset>(whole, std::move(shuffled))};
}

DataSplit open_images(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  namespace fs = std::filesystem;
  if (data.arrays.empty()) return open_synthetic(data, model, seed);
  PixelArray train = read_pixel_arrays(data.arrays);
  check_pictures(train, model.channels, model.classes);
  const ImageTransform transform = transform_of(train, data, model);
  const std::vector<int64_t> labels = train.labels;
  auto pictures = std::make_shared<PixelDataset>(std::move(train), transform, seed);
  const fs::path apart = fs::path(data.arrays) / "held_out";
  std::error_code ignored;
  if (data.held_out == 0 || !fs::exists(apart, ignored))
    return hold_out_by_class(std::move(pictures), labels, data.held_out, seed);
  PixelArray held_out = read_pixel_arrays(apart.string());
  check_pictures(held_out, model.channels, model.classes);
  return {std::move(pictures), std::make_shared<PixelDataset>(std::move(held_out), transform, seed)};
}

std::vector<std::string> class_names(const DataConfig& data) {
  constexpr uint64_t kMostBytes = 1 << 24;
  const std::filesystem::path path = std::filesystem::path(data.arrays) / "classes.txt";
  std::error_code ignored;
  if (data.arrays.empty() || !std::filesystem::exists(path, ignored)) return {};
  std::vector<std::string> names = split(read_text(path.string(), kMostBytes), '\n');
  if (names.back().empty()) names.pop_back();  // behind the last line
  return names;
}

}  // namespace twobp
