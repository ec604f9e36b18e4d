// Opens the pictures that a configuration names.
#pragma once

#include <cstdint>

#include "twobp/data/data.h"

namespace twobp {

// Opens data.images, data.idx, data.cifar, data.arrays or data.synthetic, as pictures of model.channels with labels
// below model.classes. For data.idx and data.cifar, the held-out part is in files of its own (nothing if data.held_out
// is 0). Otherwise it is data.held_out of each class. Throws Error as the data sets do.
DataSplit open_images(const DataConfig& data, const ModelInput& model, uint64_t seed);

}  // namespace twobp
