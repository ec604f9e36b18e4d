// Training pictures as files: one folder of JPEG and PNG files per class.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/data/images/transform.h"

namespace twobp {

// The sub-folders of a folder in the order of their names (as bytes), without names that begin with a dot. Throws Error
// if the folder cannot be read.
std::vector<std::string> class_folders(const std::string& folder);

// Each class is a sub-folder of a folder, counted from 0. Its pictures are the files directly in it that end in .jpg,
// .jpeg or .png, in the order of their names. Other files are not read, nor are names that begin with a dot.
// `pixel_values` (B, C, H, W) float32 and `labels` (B) int64.
class ImageFolder : public Dataset {
 public:
  // `names` are the sub-folders, [class]. Throws Error if there are fewer than two or not `classes` of them, or if a
  // class has no picture or an empty file. In a folder of few pictures, also if one has no valid header.
  ImageFolder(std::string folder, std::vector<std::string> names, int64_t classes, ImageTransform transform,
              uint64_t seed);

  int64_t size() const override { return static_cast<int64_t>(labels_.size()); }
  // Throws Error that names a picture that cannot be read or decoded.
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

  const std::vector<int64_t>& labels() const { return labels_; }  // [sample]
  std::string path(int64_t sample) const;

 private:
  std::string folder_;
  ImageTransform transform_;
  uint64_t seed_;
  std::vector<std::string> names_;
  std::vector<std::string> files_;  // [sample]: the name within the class's folder
  std::vector<int64_t> labels_;
};

// A warning that counts and names what an ImageFolder of this folder does not read although it may hold pictures: files
// of other formats and folders in the classes, and pictures beside them. Empty if there is nothing.
std::string pictures_not_read(const std::string& folder);

}  // namespace twobp
