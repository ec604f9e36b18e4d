// Writes the trained weights as a Hugging Face directory: config.json and model.safetensors, or several files
// with model.safetensors.index.json if it is large.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/files/safetensors.h"
#include "twobp/nn/parameter.h"
#include "twobp/train/config.h"
#include "twobp/train/processes.h"

namespace twobp {

struct SaveModelOptions {
  std::string dtype = "float32";  // of the weights in the file: float32, bfloat16, float16
  int64_t max_shard_bytes =
      5'000'000'000;  // a file is begun anew rather than grow beyond this: transformers'
};

// Packed weights are written as their parts, adapters merged into what they adapt (see lora.h). Of a model
// with config.from, its tokenizer's files and generation_config.json are copied. All files are on the disk
// before the first takes its name, so that a directory that was there stays whole if this fails; those of an
// older model that are not replaced are removed then. Throws Error (cannot create, disk full), naming the
// file.
// In a run of many processes all call it, each with the weights that it holds, and write files of their own
// into a folder that they share; the first adds the index and the rest.
void save_model(const std::string& directory, const ModelConfig& config, int64_t sequence,
                const std::vector<Parameter*>& weights, const SaveModelOptions& options = {},
                const Processes& processes = {});
// The same with the tensors under their names.
void save_model(const std::string& directory, const ModelConfig& config, int64_t sequence,
                const NamedTensors& weights, const SaveModelOptions& options = {},
                const Processes& processes = {});

// Fails as save_model would for a model that cannot be saved or a folder that cannot be made or written to,
// before days of training rather than after.
void check_save_model(const std::string& directory, const ModelConfig& config);

}  // namespace twobp
