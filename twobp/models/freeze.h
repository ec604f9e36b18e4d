// Frozen parameters: no W, no gradient, no optimizer state; what lies before the first layer with a trainable
// parameter has no backward at all.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/nn/layers/lora_linear.h"

namespace twobp {

// Whether a name matches a pattern in which * stands for any text and ? for any one character.
bool matches_pattern(std::string_view name, std::string_view pattern);

// Makes the layers of `model` freeze the parameters whose names match one of the patterns, and finds its
// first trainable layer. Layers of one kind that differ in what is frozen become kinds of their own, since
// they cost differently. Throws Error: a pattern that matches nothing (naming the parameters there are), or
// only a part of a packed weight.
void freeze(ModelSpec& model, const std::vector<std::string>& patterns);

// Throws Error if one of lora.targets gives no adapter in the model (naming the projections there are), or
// one to a weight that is used elsewhere too: merged into it, the adapter would change both uses.
void check_lora_targets(const ModelSpec& model, const LoraOptions& lora);

// Freezes all but the LoRA adapters.
void freeze_all_but_lora(ModelSpec& model);

}  // namespace twobp
