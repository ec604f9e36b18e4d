// The pictures that a configuration names.
#pragma once

#include <cstdint>

#include "twobp/data/data.h"

namespace twobp {

// data.images, data.idx, data.cifar, data.arrays or data.synthetic, as pictures of model.channels with labels
// below model.classes. Held out is what the files of data.idx and data.cifar keep for that (nothing if
// data.held_out is 0), else data.held_out of each class. Throws Error: what the data sets throw.
DataSplit open_images(const DataConfig& data, const ModelInput& model, uint64_t seed);

}  // namespace twobp
