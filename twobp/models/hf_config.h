// Reads and writes the config.json of a Hugging Face directory: a model's type and options.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "twobp/models/model_config.h"
#include "twobp/models/model_type.h"

namespace twobp {

// The file that makes a folder one of a PEFT adapter. If the folder also has a config.json, transformers adds the
// adapter to the model that is there. So a folder has one of the two files.
inline constexpr const char* kAdapterConfig = "adapter_config.json";
inline constexpr const char* kModelConfig = "config.json";

// A bundle of a captured model is read by its graph.json. Throws Error if the file is missing or not JSON, a value has
// the wrong type or is out of range, or the folder holds an adapter. For a model that is not supported, the Error lists
// the supported ones.
ModelOptions read_hf_config(const std::string& directory);

// Whether the model_type and a class of this config.json are supported. Throws Error if it is not JSON.
bool has_layers(const std::string& config);

// Whether a key of `type` describes weights, so that a loaded model determines it.
bool comes_with_weights(const ModelType& type, const std::string& key);

// Writes the names of classes, by number, as id2label and label2id.
void name_classes(nlohmann::json& config, const std::vector<std::string>& names);

// The config.json for transformers. For a model with `from`, it is the model's config.json, with the options, the dtype
// ("float32") and the sequence overwritten; token ids and the like are kept. `sequence` is the lower bound of
// max_position_embeddings. Throws Error for a model that transformers refuses.
nlohmann::json hf_config_json(const ModelConfig& config, int64_t sequence, const std::string& dtype);

}  // namespace twobp
