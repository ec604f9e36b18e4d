// The weight decay of each parameter: optimizer.weight_decay for matrices, unless optimizer.weight_decay_of
// has a rule for its name.
#pragma once

#include <string>
#include <vector>

#include "twobp/nn/parameter.h"
#include "twobp/train/update/optimizer_config.h"

namespace twobp {

// Throws Error for rules that are not PATTERN=DECAY.
void check_decay_rules(const OptimizerConfig& config);
// Throws Error if a pattern matches none of the names.
void check_decay_rules(const OptimizerConfig& config, const std::vector<std::string>& names);

// Throws Error if the parts of a packed weight get different ones.
double weight_decay_of(const OptimizerConfig& config, const Parameter& parameter);

}  // namespace twobp
