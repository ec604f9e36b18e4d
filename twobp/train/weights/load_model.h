// Loads the weights of a Hugging Face directory into a model's parameters.
#pragma once

#include <vector>

#include "twobp/models/model.h"
#include "twobp/models/model_weights.h"

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
// not in the parameter's range.
std::vector<std::string> load_weights(Pipeline& pipeline, const ModelWeights& weights);
// The same for parameters that are already allocated.
void load_weights(const std::vector<Parameter*>& parameters, const ModelWeights& weights);

}  // namespace twobp
