// Writes the trained weights as a Hugging Face directory: config.json and model.safetensors.
#pragma once

#include <string>
#include <vector>

#include "twobp/nn/parameter.h"
#include "twobp/train/config.h"

namespace twobp {

// Packed weights are written as their parts. Each file is written aside, synced and renamed, so that a
// directory that was there stays whole if this fails. Throws Error (cannot create, disk full), naming the
// file.
void save_model(const std::string& directory, const ModelConfig& config, int64_t sequence,
                const std::vector<Parameter*>& weights);

}  // namespace twobp
