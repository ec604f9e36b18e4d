// config.json of a Hugging Face directory: a model's type and options, read and written.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "twobp/models/model_config.h"

namespace twobp {

// Throws Error: missing, no JSON, a value of the wrong type or out of range; a model that is not supported,
// with those that are.
ModelOptions read_hf_config(const std::string& directory);

// Whether a key of `type` describes weights, and so comes with a model that is loaded.
bool comes_with_weights(const ModelType& type, const std::string& key);

// What transformers reads. Of a model with `from`, its config.json with the options, the dtype ("float32")
// and the sequence written over it: token ids and the like stay. `sequence` is the least
// max_position_embeddings.
nlohmann::json hf_config_json(const ModelConfig& config, int64_t sequence, const std::string& dtype);

}  // namespace twobp
