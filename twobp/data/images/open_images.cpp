#include "twobp/data/images/open_images.h"

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/data/images/class_names.h"
#include "twobp/data/images/image_folder.h"
#include "twobp/data/images/pixel_array.h"
#include "twobp/data/images/transform.h"
#include "twobp/data/subset.h"
#include "twobp/data/synthetic_dataset.h"
#include "twobp/files/glob.h"

namespace twobp {
namespace {

constexpr int64_t kUsualSize = 224;

ImageOptions options_of(const DataConfig& data, const ModelInput& model, int64_t height, int64_t width) {
  ImageOptions options;
  options.channels = model.channels;
  options.height = data.image_size > 0 ? data.image_size : height;
  options.width = data.image_size > 0 ? data.image_size : width;
  options.crop = data.crop.empty() ? Crop::kNone : parse_crop(data.crop);
  options.padding = data.padding;
  options.flip = data.flip;
  options.mean = data.mean;
  options.std = data.std;
  return options;
}

DataSplit open_folder(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  TWOBP_CHECK(model.channels == 1 || model.channels == 3, "model.channels is ", model.channels,
              ", but data.images gives pictures of 1 (grey) or 3 (colours): for a new model, set it to one "
              "of these; for "
              "model.from, give such pictures in data.arrays.");
  ImageOptions options = options_of(data, model, kUsualSize, kUsualSize);
  if (data.crop.empty()) options.crop = Crop::kResized;
  const bool grey = model.channels == 1;  // uses the statistics of ImageNet's luma
  if (options.mean.empty()) options.mean = grey ? std::vector<double>{0.459} : std::vector<double>{0.485, 0.456, 0.406};
  if (options.std.empty()) options.std = grey ? std::vector<double>{0.226} : std::vector<double>{0.229, 0.224, 0.225};
  auto pictures = std::make_shared<ImageFolder>(data.images, class_names(data, model), model.classes,
                                                ImageTransform(options), seed);
  const std::vector<int64_t> labels = pictures->labels();
  return hold_out_by_class(std::move(pictures), labels, data.held_out, seed);
}

// The transform for `train`. `held_out` must use the same one.
ImageTransform transform_of(const PixelArray& train, const DataConfig& data, const ModelInput& model) {
  ImageOptions options = options_of(data, model, train.height, train.width);
  if (train.type == at::kByte && (data.mean.empty() || data.std.empty())) {
    const PixelStatistics measured = pixel_statistics(train);
    if (data.mean.empty()) options.mean = measured.mean;
    if (data.std.empty()) options.std = measured.std;
  }
  return ImageTransform(options);
}

DataSplit open_pixels(PixelArray train, const DataConfig& data, const ModelInput& model, uint64_t seed) {
  check_pictures(train, model.channels, model.classes);
  const ImageTransform transform = transform_of(train, data, model);
  const std::vector<int64_t> labels = train.labels;
  return hold_out_by_class(std::make_shared<PixelDataset>(std::move(train), transform, seed), labels, data.held_out,
                           seed);
}

// Opens pictures with a separate held-out set.
DataSplit open_pixels(PixelArray train, PixelArray held_out, const DataConfig& data, const ModelInput& model,
                      uint64_t seed) {
  check_pictures(train, model.channels, model.classes);
  check_pictures(held_out, model.channels, model.classes);
  const ImageTransform transform = transform_of(train, data, model);
  return {std::make_shared<PixelDataset>(std::move(train), transform, seed),
          std::make_shared<PixelDataset>(std::move(held_out), transform, seed)};
}

DataSplit open_idx(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  PixelArray train = read_idx(data.idx, "train");
  if (data.held_out == 0 || !has_idx(data.idx, "t10k")) return open_pixels(std::move(train), data, model, seed);
  return open_pixels(std::move(train), read_idx(data.idx, "t10k"), data, model, seed);
}

DataSplit open_cifar(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  PixelArray train = read_cifar(
      matching_files((std::filesystem::path(data.cifar) / "data_batch_*.bin").string(), "data.cifar", ".bin"));
  const std::string held_out = (std::filesystem::path(data.cifar) / "test_batch.bin").string();
  std::error_code ignored;
  if (data.held_out == 0 || !std::filesystem::exists(held_out, ignored)) {
    return open_pixels(std::move(train), data, model, seed);
  }
  return open_pixels(std::move(train), read_cifar({held_out}), data, model, seed);
}

DataSplit open_synthetic(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  const int64_t size = data.image_size > 0 ? data.image_size : kUsualSize;
  const auto images = std::make_shared<SyntheticImages>(kSyntheticSamples, model.channels, size, model.classes, seed);
  return hold_out_by_class(images, std::vector<int64_t>(kSyntheticSamples), data.held_out, seed);
}

}  // namespace

DataSplit open_images(const DataConfig& data, const ModelInput& model, uint64_t seed) {
  if (!data.images.empty()) return open_folder(data, model, seed);
  if (!data.idx.empty()) return open_idx(data, model, seed);
  if (!data.cifar.empty()) return open_cifar(data, model, seed);
  if (!data.arrays.empty()) return open_pixels(read_pixel_arrays(data.arrays), data, model, seed);
  TWOBP_CHECK(data.synthetic == "images",
              "no pictures are given: set data.images, data.idx, data.cifar, data.arrays or "
              "data.synthetic (images).");
  return open_synthetic(data, model, seed);
}

}  // namespace twobp
