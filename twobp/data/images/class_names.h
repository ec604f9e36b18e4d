// The names of the classes of pictures, by number.
#pragma once

#include <string>
#include <vector>

#include "twobp/data/data_config.h"
#include "twobp/data/model_input.h"

namespace twobp {

// Of data.images: its sub-folders. The numbers are those that the model in model.from gives these names
// (id2label in its config.json), if it has the same names. Otherwise they follow the order of the names (as
// bytes). Names that begin with a dot are no classes. Empty without data.images. Throws Error if the folder
// cannot be read.
std::vector<std::string> class_names(const DataConfig& data, const ModelInput& model);

}  // namespace twobp
