// config.json of a Hugging Face directory: the architecture, read into a ModelConfig and written from one.
// Which models are supported: see architecture.h.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "twobp/config/config.h"

namespace twobp {

// Sets the architecture keys of `config` (see is_architecture_key). Throws Error: missing, no JSON, a value
// of the wrong type or out of range; a model that is not supported, with what is.
void read_hf_config(const std::string& directory, ModelConfig& config);

// The same with config.from, which `given` keys ("model.dim") must not contradict: Error says so.
void fill_from_hf(ModelConfig& config, const std::set<std::string>& given);

// What transformers reads. Of a model with `from`, its config.json with the architecture, the dtype
// ("float32") and the sequence written over what is there: token ids and the like stay. `sequence` is the
// least max_position_embeddings.
nlohmann::json hf_config_json(const ModelConfig& config, int64_t sequence, const std::string& dtype);

// Whether "model.dim" and the like describes the architecture, which comes with a model that is loaded.
bool is_architecture_key(std::string_view full_name);

}  // namespace twobp
