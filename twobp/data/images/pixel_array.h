// Pictures in a few files of raw pixels: MNIST's IDX files, CIFAR-10's binary files, NumPy arrays.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/data/data.h"
#include "twobp/data/images/transform.h"

namespace twobp {

class NpyArray;

struct PixelArray {
  std::string path;                      // for messages
  std::shared_ptr<const void> owner;     // keeps `pixels` alive
  const void* pixels = nullptr;          // (count, channels, height, width), contiguous, or
  std::shared_ptr<const NpyArray> file;  // the file to read them from
  at::ScalarType type = at::kByte;       // or kFloat
  int64_t count = 0;
  int64_t channels = 1;
  int64_t height = 0;
  int64_t width = 0;
  std::vector<int64_t> labels;  // [picture]
};

// Reads the pictures and labels of MNIST's files in a folder: `part`-images-idx3-ubyte and `part`-labels-idx1-ubyte,
// where `part` is "train" or "t10k". A dot may replace the dash before "idx", and .gz may follow. Throws Error if a
// file is missing, is not IDX of bytes, or does not have the length in its header (truncated), or if the numbers of
// labels and pictures differ.
PixelArray read_idx(const std::string& folder, const std::string& part);
// Whether the folder has these files.
bool has_idx(const std::string& folder, const std::string& part);

// Reads CIFAR-10's binary files in this order: records of a label and 3 x 32 x 32 bytes. Throws Error if a file is
// missing or is not a whole number of records, or a label is above 9.
PixelArray read_cifar(const std::vector<std::string>& files);

// Reads pixel_values.npy (N, C, H, W), uint8 or float32, and labels.npy (N), of integers.
// Throws Error for another type or shape, no pictures, or another .npy file in the folder, and as NpyArray does.
PixelArray read_pixel_arrays(const std::string& folder);

// Advice for a message that the data has `count` classes and the model another number.
std::string classes_advice(int64_t count);

// Throws Error unless the pictures have `channels` channels or one, all labels are in [0, classes), and at least two
// labels differ.
void check_pictures(const PixelArray& array, int64_t channels, int64_t classes);

// Mean and standard deviation of each channel's bytes over 255, over at most 10,000 evenly spread pictures. A constant
// channel has deviation 1.
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
  // Throws Error for a float that is not finite, with the picture's number.
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

  const std::vector<int64_t>& labels() const { return array_.labels; }

 private:
  PixelArray array_;
  ImageTransform transform_;
  uint64_t seed_;
};

}  // namespace twobp
