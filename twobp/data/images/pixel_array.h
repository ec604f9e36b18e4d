// Pictures that lie in few files as raw pixels: MNIST's IDX files, CIFAR-10's binary files, NumPy arrays.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/data/data.h"
#include "twobp/data/images/transform.h"

namespace twobp {

struct PixelArray {
  std::string path;                   // for messages
  std::shared_ptr<const void> owner;  // keeps `pixels` alive
  const void* pixels = nullptr;       // (count, channels, height, width), contiguous
  at::ScalarType type = at::kByte;    // or kFloat
  int64_t count = 0;
  int64_t channels = 1;
  int64_t height = 0;
  int64_t width = 0;
  std::vector<int64_t> labels;  // [picture]
};

// The pictures and labels of MNIST's files in a folder: `part`-images-idx3-ubyte and
// `part`-labels-idx1-ubyte, `part` "train" or "t10k"; a dot may stand for the dash before "idx", and .gz may
// follow. Throws Error: missing, not IDX of bytes, of another length than its header says (truncated), as
// many labels as pictures there are not.
PixelArray read_idx(const std::string& folder, const std::string& part);
// Whether the folder has such pictures.
bool has_idx(const std::string& folder, const std::string& part);

// CIFAR-10's binary files, in this order: records of a label and 3 x 32 x 32 bytes. Throws Error: missing, no
// whole number of records, a label above 9.
PixelArray read_cifar(const std::vector<std::string>& files);

// pixel_values.npy (N, C, H, W), uint8 or float32, mapped, and labels.npy (N), of integers. Throws Error:
// what NpyArray throws, another type or shape, no picture.
PixelArray read_pixel_arrays(const std::string& folder);

// Throws Error unless the pictures have `channels` or 1, all labels are in [0, classes), and two of them
// differ.
void check_pictures(const PixelArray& array, int64_t channels, int64_t classes);

// Mean and standard deviation of each channel's bytes over 255, over at most 10,000 pictures, evenly spread.
// A channel that is the same everywhere has 1.
struct PixelStatistics {
  std::vector<double> mean;
  std::vector<double> std;
};
PixelStatistics pixel_statistics(const PixelArray& array);

// `pixel_values` (B, C, H, W) float32 and `labels` (B) int64.
class PixelDataset : public Dataset {
 public:
  PixelDataset(PixelArray array, ImageTransform transform, uint64_t seed);

  int64_t size() const override { return array_.count; }
  // Throws Error: a float that is not finite, with the picture's number.
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

  const std::vector<int64_t>& labels() const { return array_.labels; }

 private:
  PixelArray array_;
  ImageTransform transform_;
  uint64_t seed_;
};

}  // namespace twobp
