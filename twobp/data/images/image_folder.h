// Training pictures as files: a folder of JPEG and PNG files per class.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/data/images/transform.h"

namespace twobp {

// Classes are the sub-folders of a folder in the order of their names (as bytes): the first is 0. Their
// pictures are the files directly in them that are named .jpg, .jpeg or .png, in the order of their names;
// other files are left out, as are names that begin with a dot. `pixel_values` (B, C, H, W) float32 and
// `labels` (B) int64.
class ImageFolder : public Dataset {
 public:
  // Throws Error: no such folder, fewer than two classes or not `classes` of them, a class without a picture,
  // an empty file, and in a folder of few pictures any that has no valid header.
  ImageFolder(std::string folder, int64_t classes, ImageTransform transform, uint64_t seed);

  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }
  // Throws Error: a picture that cannot be read or decoded, with its name.
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

  const std::vector<int64_t>& labels() const { return labels_; }          // [sample]
  const std::vector<std::string>& class_names() const { return names_; }  // [class]
  std::string path(int64_t sample) const;

 private:
  std::string folder_;
  ImageTransform transform_;
  uint64_t seed_;
  std::vector<std::string> names_;
  std::vector<std::string> files_;  // [sample]: the name in the class's folder
  std::vector<int64_t> labels_;
};

}  // namespace twobp
