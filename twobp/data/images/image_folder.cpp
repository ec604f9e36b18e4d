// Reads headers on opening if that takes only seconds, so that most bad files are found before training.
#include "twobp/data/images/image_folder.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/extension.h"
#include "twobp/data/images/encoded_image.h"
#include "twobp/data/images/pixel_array.h"
#include "twobp/files/input_file.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kHeadersRead = 20'000;

// The entries of a folder that satisfy `wanted`, sorted by name.
template <typename Wanted>
std::vector<std::string> entries(const std::string& folder, Wanted&& wanted) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.front() != '.' && wanted(*entry)) names.push_back(name);
  }
  TWOBP_CHECK(!error, "data.images: ", folder, ": cannot read the folder: ", error.message(), ".");
  std::sort(names.begin(), names.end());
  return names;
}

bool is_folder(const fs::directory_entry& entry) {
  std::error_code ignored;
  return entry.is_directory(ignored);
}

bool is_picture(const fs::directory_entry& entry) {
  const std::string extension = lower_extension(entry.path());
  return (extension == ".jpg" || extension == ".jpeg" || extension == ".png") && !is_folder(entry);
}

// What a class's folder has apart from pictures that are read: "a.webp", "more/".
std::vector<std::string> others(const std::string& folder) {
  std::vector<std::string> names = entries(folder, [](const auto& entry) { return !is_picture(entry); });
  for (std::string& name : names) {
    if (is_folder(fs::directory_entry(fs::path(folder) / name))) name += "/";
  }
  return names;
}

// "a.webp, b.webp, more/ and 7 others".
std::string first_few(std::vector<std::string> names) {
  constexpr size_t kShown = 3;
  const size_t rest = names.size() - std::min(names.size(), kShown);
  names.resize(names.size() - rest);
  return join(names) + (rest == 0 ? "" : concat(" and ", rest, rest == 1 ? " other" : " others"));
}

// The factor by which a JPEG may be reduced in decoding, so that the part in use is at least as large as the result.
int64_t reduction(const ImageDraw& draw, const ImageOptions& options) {
  int64_t reduce = 1;
  while (reduce < 8 && draw.height >= 2 * reduce * options.height && draw.width >= 2 * reduce * options.width) {
    reduce *= 2;
  }
  return reduce;
}

// The same part of a picture in another resolution.
ImageDraw scaled(ImageDraw draw, int64_t height, int64_t width, const at::Tensor& image) {
  const auto scale = [](int64_t value, int64_t from, int64_t to) { return (value * to + from / 2) / from; };
  const int64_t bottom = scale(draw.top + draw.height, height, image.size(1));
  const int64_t right = scale(draw.left + draw.width, width, image.size(2));
  draw.top = std::min(scale(draw.top, height, image.size(1)), image.size(1) - 1);
  draw.left = std::min(scale(draw.left, width, image.size(2)), image.size(2) - 1);
  draw.height = std::max<int64_t>(bottom - draw.top, 1);
  draw.width = std::max<int64_t>(right - draw.left, 1);
  return draw;
}

}  // namespace

std::string pictures_not_read(const std::string& folder) {
  // Beside the classes, other files (such as a list of their names) are usual, but pictures are not.
  std::vector<std::string> names = entries(folder, is_picture);
  for (const std::string& name : entries(folder, is_folder)) {
    for (const std::string& other : others(folder + "/" + name)) names.push_back(name + "/" + other);
  }
  if (names.empty()) return "";
  return concat("data.images: ", names.size(), names.size() == 1 ? " entry of " : " entries of ", folder,
                names.size() == 1 ? " is" : " are", " not read: ", first_few(names),
                ": pictures are the .jpg, .jpeg and .png files directly in a class's folder: convert or move "
                "others to there, or remove them");
}

std::vector<std::string> class_folders(const std::string& folder) {
  return entries(folder, is_folder);
}

ImageFolder::ImageFolder(std::string folder, std::vector<std::string> names, int64_t classes, ImageTransform transform,
                         uint64_t seed)
    : folder_(std::move(folder)), transform_(std::move(transform)), seed_(seed), names_(std::move(names)) {
  while (folder_.size() > 1 && folder_.back() == '/') folder_.pop_back();
  const auto count = static_cast<int64_t>(names_.size());
  TWOBP_CHECK(count >= 2, "data.images: ", folder_, " has ", count, count == 1 ? " sub-folder (" : " sub-folders",
              count == 1 ? names_.front() + ")" : "",
              ", but each class needs one of its own, and there must be two or more: name the folder that "
              "holds them.");
  TWOBP_CHECK(count == classes, "data.images: ", folder_, " has ", count, " sub-folders, one per class (",
              names_.front(), " to ", names_.back(), "), but model.classes is ", classes, ": ", classes_advice(count));
  for (int64_t label = 0; label < count; ++label) {
    const std::string path = folder_ + "/" + names_[static_cast<size_t>(label)];
    std::vector<std::string> files = entries(path, is_picture);
    if (files.empty()) {
      const std::vector<std::string> instead = others(path);
      fail("data.images: ", path, " has no .jpg, .jpeg or .png file in it",
           instead.empty() ? "" : concat(" (but ", first_few(instead), ")"),
           ": put pictures of the class there, converted to one of these, or remove the folder.");
    }
    labels_.insert(labels_.end(), files.size(), label);
    std::move(files.begin(), files.end(), std::back_inserter(files_));
  }
  for (int64_t sample = 0; sample < size(); ++sample) {
    const std::string file = path(sample);
    std::error_code error;
    const uintmax_t bytes = fs::file_size(file, error);
    TWOBP_CHECK(error || bytes > 0, file, ": the file is empty: replace it or remove it.");
    if (size() > kHeadersRead) continue;
    const std::vector<uint8_t> content = read_whole_file(file);
    const EncodedImage header(content, file);
  }
}

std::string ImageFolder::path(int64_t sample) const {
  const auto at = static_cast<size_t>(sample);
  return folder_ + "/" + names_[static_cast<size_t>(labels_[at])] + "/" + files_[at];
}

Fields ImageFolder::read(const std::vector<int64_t>& indices, int64_t epoch) const {
  const auto count = static_cast<int64_t>(indices.size());
  const ImageOptions& options = transform_.options();
  at::Tensor images = at::empty({count, options.channels, options.height, options.width}, at::kFloat);
  at::Tensor labels = at::empty({count}, at::kLong);
  for (int64_t b = 0; b < count; ++b) {
    const int64_t index = indices[static_cast<size_t>(b)];
    TWOBP_CHECK(index >= 0 && index < size(), "data.images: ", folder_, ": no sample ", index, ", there are ", size(),
                ".");
    const std::vector<uint8_t> content = read_whole_file(path(index));
    const EncodedImage encoded(content, path(index));
    const ImageDraw draw = transform_.draw(encoded.height(), encoded.width(), seed_, epoch, index);
    // Evaluation uses every pixel, as in other programs.
    const at::Tensor image =
        encoded.decode(options.channels, epoch == kEvaluation ? 1 : reduction(draw, options));  // (C, H, W)
    transform_.apply(image, scaled(draw, encoded.height(), encoded.width(), image),
                     images.data_ptr<float>() + b * transform_.elements());
    labels.data_ptr<int64_t>()[b] = labels_[static_cast<size_t>(index)];
  }
  return {{"pixel_values", std::move(images)}, {"labels", std::move(labels)}};
}

}  // namespace twobp
