// Writes the trained weights as a Hugging Face directory: config.json and model.safetensors. Large models are split
// into several files with model.safetensors.index.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "twobp/nn/parameter.h"
#include "twobp/train/config.h"
#include "twobp/transport/processes.h"

namespace twobp {

struct SaveModelOptions {
  std::string dtype = "float32";            // of the weights in the files: float32, bfloat16, float16
  std::string tokenizer{};                  // the run's: see tokenizer_of; empty: that of config.from
  std::vector<std::string> class_names{};   // the run's: see class_names; empty: those of config.from
  int64_t max_shard_bytes = 5'000'000'000;  // the size limit of a file: that of transformers
};

// The options for saving the model of a run. Names of classes are left out if the run's data no longer exist.
SaveModelOptions save_options(const Config& config, const std::string& dtype);

// Packed weights are written as their parts, and adapters are merged into what they adapt (see adapter_files.h). The
// files of the tokenizer, and for a model with config.from those of its picture processor and its generation settings,
// are copied if they are still there. All files are on disk before the first takes its name, so an existing directory
// stays whole if this fails. Files of an older model that are not replaced are removed then. Throws Error (cannot
// create, disk full) that names the file, also if the directory holds an adapter, or a weight is not finite or beyond
// the range of options.dtype. In a run of many processes all call it, each with the weights that it holds. They write
// their own files into a shared folder, and the first adds the index and the rest.
void save_model(const std::string& directory, const ModelConfig& config, int64_t sequence,
                const std::vector<Parameter*>& weights, const SaveModelOptions& options = {},
                const Processes& processes = {});
// The same with the tensors under their names.
void save_model(const std::string& directory, const ModelConfig& config, int64_t sequence,
                const std::vector<std::pair<std::string, at::Tensor>>& weights, const SaveModelOptions& options = {},
                const Processes& processes = {});

// A warning if the run's tokenizer is no longer where it was, so that save_model did not copy it; else empty.
std::string missing_tokenizer(const SaveModelOptions& options, const std::string& directory);

// Fails like save_model or save_adapter for a model that cannot be saved, or a folder that cannot be made or written
// to, and leaves no folder behind. Also fails if the folder holds a file, such as a generation_config.json, that its
// readers would take for this model's, and that save_model would not replace. For those of tokenizers, `tokenizer` is
// the run's (see SaveModelOptions); none: the run does not know, so the folder's may be the right one. Call this before
// days of training rather than after.
void check_save(const SaveConfig& save, const ModelConfig& model,
                const std::optional<std::string>& tokenizer = std::nullopt);

}  // namespace twobp
