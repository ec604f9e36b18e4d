// Selects the layers of a model that recompute instead of keeping (see models/recompute/recompute_layer.h).
#pragma once

#include <string>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/models/recompute/recompute_layer.h"

namespace twobp {

// One setting: MODE for all layers but the model's first and last, stage:N=MODE for the layers of one stage, or
// PATTERN=MODE for the layers whose names match (* and ?), including the first and last.
struct RecomputeRule {
  Recompute mode = Recompute::kNone;
  std::string pattern;  // of layer names; empty: the rule is by stage
  int stage = -1;       // -1: all stages
};

// Throws Error for an unknown mode, an empty pattern, or a stage that is not a number.
RecomputeRule parse_recompute_rule(const std::string& text);

// Returns a mode per layer; later rules win. `split` has the layers of each stage and is empty if they are unknown.
// Throws Error if a pattern matches no layer, or a stage does not exist or is unknown.
std::vector<Recompute> modes_by_layer(const ModelSpec& model, const std::vector<RecomputeRule>& rules,
                                      const std::vector<int>& split);

// Makes layer i of `model` recompute as modes[i] says. Layers of one kind with different modes become different kinds
// ("mlp+activations"), because their costs differ.
void recompute(ModelSpec& model, const std::vector<Recompute>& modes);

}  // namespace twobp
