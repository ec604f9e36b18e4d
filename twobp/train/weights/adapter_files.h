// LoRA adapters and files. Adapters are merged into the weights they adapt, or saved separately as PEFT does
// (adapter_config.json, adapter_model.safetensors).
#pragma once

#include <string>
#include <vector>

#include "twobp/files/safetensors.h"
#include "twobp/models/model.h"
#include "twobp/nn/parameter.h"
#include "twobp/train/config.h"
#include "twobp/train/processes.h"

namespace twobp {

// The weights under their parts' names, each with its adapter added (float32). A model without adapters gives
// the same results with them. Weights without adapters are unchanged.
NamedTensors merged_weights(const std::vector<Parameter*>& weights, const ModelConfig& model);

// Writes only the adapters into `directory`. In a run of many processes all call it, each with the weights
// that it holds, and the first writes. Throws Error.
void save_adapter(const std::string& directory, const ModelConfig& model,
                  const std::vector<Parameter*>& weights, const Processes& processes = {});

// Loads the adapters among `weights` from a PEFT directory. Its rank, alpha and targets must be the model's.
// `spec` is the whole model; `weights` may be a part. Throws Error.
void load_adapter(const std::string& directory, const ModelConfig& model, const ModelSpec& spec,
                  const std::vector<Parameter*>& weights);

}  // namespace twobp
