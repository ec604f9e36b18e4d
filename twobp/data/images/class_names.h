// The names of the classes of pictures, by number.
#pragma once

#include <string>
#include <vector>

#include "twobp/data/data_config.h"

namespace twobp {

// The classes of data.images are its sub-folders, except those whose names begin with a dot. Their numbers are those in
// the model of model.from (id2label in its config.json), if it has the same names. Otherwise the numbers follow the
// order of the names (as bytes). Empty without data.images. Throws Error if the folder cannot be read.
std::vector<std::string> class_names(const DataConfig& data, const ModelInput& model);

}  // namespace twobp
