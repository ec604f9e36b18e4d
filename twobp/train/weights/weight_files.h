// Reads the weights of Hugging Face directories and of LoRA adapters, and writes adapters (save_model.h writes whole
// models).
#pragma once

#include <string>
#include <vector>

#include "twobp/files/safetensors.h"
#include "twobp/models/model.h"
#include "twobp/models/model_weights.h"
#include "twobp/nn/parameter.h"
#include "twobp/train/config.h"
#include "twobp/transport/processes.h"

namespace twobp {

class Pipeline;

// Compares the directory's names and shapes with the model's, before any of the model's memory is allocated. LoRA
// adapters and the names in weights.may_lack may be missing. Tensors that are no parameters are compared with what they
// must be (see TensorNames). Throws Error: one message with the first missing, misshaped, unknown and contradictory
// tensors. Returns the names of the parameters that the directory lacks.
std::vector<std::string> check_weights(const ModelSpec& model, const ModelWeights& weights);

// Loads every parameter from the directory, converted to the parameter's dtype, except for LoRA adapters and what the
// directory may lack. Returns the names of what it lacks. Each rank copies its own stages on its own thread and reads
// no others. Throws as check_weights does, or if a tensor is not of a floating-point type, or a number is not finite or
// not in the parameter's range. `whole`: the model with the experts of all replicas, if the pipeline has a part of
// them.
std::vector<std::string> load_weights(Pipeline& pipeline, const ModelWeights& weights,
                                      const ModelSpec* whole = nullptr);
// The same for parameters that are already allocated.
void load_weights(const std::vector<Parameter*>& parameters, const ModelWeights& weights);

// LoRA adapters and files. Adapters are merged into the weights they adapt, or saved separately as PEFT does
// (adapter_config.json, adapter_model.safetensors).

// The weights under their parts' names, each with its adapter added (float32). A model without adapters gives the same
// results with them. Weights without adapters are unchanged.
NamedTensors merged_weights(const std::vector<Parameter*>& weights, const ModelConfig& model);

// The type that save.dtype names. Throws Error if there is none.
at::ScalarType parse_saved_dtype(const std::string& name);

// Throws Error if a weight to be saved has a value that is not finite.
void check_trained(const NamedTensors& weights);

// Writes only the adapters into `directory`. In a run of many processes all call it, each with the weights that it
// holds, and the first writes. Throws Error, also if the directory holds a model.
void save_adapter(const std::string& directory, const ModelConfig& model, const std::vector<Parameter*>& weights,
                  const std::string& dtype = "float32", const Processes& processes = {});

// Throws Error if the directory holds a model, to which transformers would add an adapter that is saved there.
void check_adapter_folder(const std::string& directory);

// Loads the adapters among `weights` from a PEFT directory. Its rank, alpha and targets must be the model's, and no
// other key of adapter_config.json may change what the adapter computes. `spec` is the whole model; `weights` may be a
// part. Throws Error.
void load_adapter(const std::string& directory, const ModelConfig& model, const ModelSpec& spec,
                  const std::vector<Parameter*>& weights);

}  // namespace twobp
