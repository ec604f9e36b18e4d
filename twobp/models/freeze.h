// Frozen parameters have no W, no gradient and no optimizer state. Layers before the first one with a trainable
// parameter have no backward pass at all.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/nn/layers/lora_linear.h"

namespace twobp {

// Whether a name matches a pattern. In the pattern, * stands for any text and ? for any single character.
bool matches_pattern(std::string_view name, std::string_view pattern);

// Makes the layers of `model` freeze the parameters whose names match one of the patterns, and finds the first
// trainable layer. Layers of one kind that differ in what is frozen become different kinds, because their costs differ.
// Throws Error if a pattern matches nothing (naming the existing parameters), or only a part of a packed weight.
void freeze(ModelSpec& model, const std::vector<std::string>& patterns);

// Whether a target of LoRA is a tensor of all experts: one of PEFT's target_parameters.
bool names_experts(const std::string& target);

// Throws Error if one of lora.targets gives no adapter in the model (naming the existing projections). Also throws
// Error if it gives one to a weight that is also used elsewhere, because merging the adapter would change both uses.
void check_lora_targets(const ModelSpec& model, const LoraOptions& lora);

// Freezes everything except the LoRA adapters.
void freeze_all_but_lora(ModelSpec& model);

}  // namespace twobp
