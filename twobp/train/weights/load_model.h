// Weights of a Hugging Face directory into a model's parameters.
#pragma once

#include <vector>

#include "twobp/models/model.h"
#include "twobp/models/model_weights.h"

namespace twobp {

class Pipeline;

// Names and shapes of the directory against the model's, before any of its memory is allocated. LoRA adapters
// need not be there, nor what weights.may_lack; `*.rotary_emb.inv_freq` and, of a tied model, the output
// projection's weight may be. Throws Error: one message with the first missing, misshaped and unknown
// tensors. Returns the names of the parameters that the directory lacks.
std::vector<std::string> check_weights(const ModelSpec& model, const ModelWeights& weights);

// Sets every parameter but LoRA adapters and what the directory may lack to the directory's, converted to the
// parameter's dtype, and returns what it lacks. Each rank
// copies its own stages' on its own thread, and reads no others. Throws as check_weights does, or if a tensor
// is of a type that is no floating point number.
std::vector<std::string> load_weights(Pipeline& pipeline, const ModelWeights& weights);
// The same for parameters that are allocated.
void load_weights(const std::vector<Parameter*>& parameters, const ModelWeights& weights);

}  // namespace twobp
