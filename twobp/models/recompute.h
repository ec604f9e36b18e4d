// Which layers of a model compute again what they would keep (see nn/layers/recompute.h).
#pragma once

#include <string>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/nn/layers/recompute.h"

namespace twobp {

// One setting: MODE for all layers but the model's first and last, stage:N=MODE for those of one stage, or
// PATTERN=MODE for the layers whose names match (* and ?), first and last included.
struct RecomputeRule {
  Recompute mode = Recompute::kNone;
  std::string pattern;  // of layer names; empty: by stage
  int stage = -1;       // -1: all of them
};

// Throws Error: an unknown mode, no pattern, a stage that is no number.
RecomputeRule parse_recompute_rule(const std::string& text);

// A mode per layer; later rules win. `split`: layers of each stage, empty if they are not known. Throws
// Error: a pattern that matches no layer, a stage that is not there or not known.
std::vector<Recompute> recompute_modes(const ModelSpec& model, const std::vector<RecomputeRule>& rules,
                                       const std::vector<int>& split);

// Makes layer i of `model` recompute as modes[i] says. Layers of one kind and different modes become kinds of
// their own ("mlp+activations"), since they cost differently.
void recompute(ModelSpec& model, const std::vector<Recompute>& modes);

}  // namespace twobp
