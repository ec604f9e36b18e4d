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

// Throws Error if one of lora.targets gives no adapter in the model (naming the existing projections). Also throws
// Error if it gives one to a weight that is also used elsewhere, because merging the adapter would change both uses.
void check_lora_targets(const ModelSpec& model, const LoraOptions& lora);

// Freezes everything except the LoRA adapters.
void freeze_all_but_lora(ModelSpec& model);

// A model whose layers wait instead of computing, and hold bytes instead of values. It serves to study schedules on the
// real executor and transport with more ranks than cores.
struct EmulatedLayer {
  double forward = 0;  // seconds per micro-batch
  double backward_p1 = 0;
  double backward_p2 = 0;
  int64_t activation_bytes = 0;  // held from F until I
  int64_t stash_bytes = 0;       // held from I until W; part of the activations as far as these suffice
  int64_t boundary_bytes = 4;    // size of its output and of dL/d(output)
  int64_t gradient_bytes = 0;    // size of a weight that it does not use; its gradient is zero

  bool operator==(const EmulatedLayer&) const = default;
};

// Layers with equal numbers are of one kind. The model has no input, and the loss is 0. Throws Error for no layer and
// for negative numbers.
ModelSpec emulated(const std::vector<EmulatedLayer>& layers);

}  // namespace twobp
