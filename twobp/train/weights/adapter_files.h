// LoRA adapters and files: merged into the weights they adapt, or saved apart as PEFT does
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

// The weights under their parts' names, each with its adapter added to it (float32): what a model without
// adapters has that gives the same results. Without adapters, the weights as they are.
NamedTensors merged_weights(const std::vector<Parameter*>& weights, const ModelConfig& model);

// Writes the adapters alone into `directory`. In a run of many processes all call it, each with the weights
// that it holds; the first writes. Throws Error.
void save_adapter(const std::string& directory, const ModelConfig& model,
                  const std::vector<Parameter*>& weights, const Processes& processes = {});

// Sets the adapters among `weights` to those of a PEFT directory, whose rank, alpha and targets must be the
// model's; `spec` is all of it, `weights` may be a part. Throws Error.
void load_adapter(const std::string& directory, const ModelConfig& model, const ModelSpec& spec,
                  const std::vector<Parameter*>& weights);

}  // namespace twobp
