// Pictures as raw pixels, in NumPy arrays. scripts/pictures_to_arrays.py makes them of other files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/data/data.h"
#include "twobp/data/image_transform.h"
#include "twobp/files/npy.h"

namespace twobp {

struct PixelArray {
  std::shared_ptr<const NpyArray> pixels;  // (count, channels, height, width), uint8 or float32
  std::vector<int64_t> labels;             // [picture]

  int64_t size(int dim) const { return pixels->shape()[dim]; }
  bool bytes() const { return pixels->type() == NpyType::kUInt8; }
};

// Reads pixel_values.npy (N, C, H, W), uint8 or float32, and labels.npy (N), of integers.
// Throws Error for another type or shape, no pictures, or another .npy file in the folder, and as NpyArray
// does.
PixelArray read_pixel_arrays(const std::string& folder);

// Throws Error unless the pictures have `channels` channels or one, all labels are in [0, classes), and at
// least two labels differ.
void check_pictures(const PixelArray& array, int64_t channels, int64_t classes);

// Mean and standard deviation of each channel's bytes over 255, over at most 10,000 evenly spread pictures. A
// constant channel has deviation 1.
struct PixelStatistics {
  std::vector<double> mean;
  std::vector<double> std;
};
PixelStatistics pixel_statistics(const PixelArray& array);

// `pixel_values` (B, C, H, W) float32 and `labels` (B) int64.
class PixelDataset : public Dataset {
 public:
  PixelDataset(PixelArray array, ImageTransform transform, uint64_t seed);

  int64_t size() const override { return array_.size(0); }
  // Throws Error for a float that is not finite, with the picture's number.
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;

 private:
  PixelArray array_;
  ImageTransform transform_;
  uint64_t seed_;
};

// Opens data.arrays or data.synthetic, as pictures of model.channels with labels below model.classes. The
// held-out part is in data.arrays/held_out, if there is such a folder (it is not read if data.held_out is 0).
// Otherwise it is data.held_out of each class. Throws Error as the data sets do.
DataSplit open_images(const DataConfig& data, const ModelInput& model, uint64_t seed);

// The names of the classes by number: the lines of classes.txt in data.arrays. Empty without such a file.
// Throws Error if it cannot be read.
std::vector<std::string> class_names(const DataConfig& data);

// Holds out `fraction` of each class, chosen by `seed`: at least one sample in total, and never a class's
// last sample. The held-out samples are shuffled once, so that the first of them come from all classes.
// `labels` are the samples' classes. A fraction of 0 holds out nothing. Throws Error if no class has two
// samples.
DataSplit hold_out_by_class(std::shared_ptr<Dataset> whole, const std::vector<int64_t>& labels, double fraction,
                            uint64_t seed);

}  // namespace twobp
