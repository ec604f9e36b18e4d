// The learning rate of each step.
#pragma once

#include <cstdint>

#include "twobp/train/config.h"

namespace twobp {

// The learning rate of step `step`, counted from 0, of a run of `total_steps`. With w = warmup:
//   step < w       lr * (step + 1) / (w + 1): no step has rate 0, and step w is the first at lr
//   constant       lr
//   linear         lr + (min_lr - lr) * p
//   cosine         min_lr + (lr - min_lr) * (1 + cos(pi * p)) / 2
// where p = (step - w) / (total_steps - w), at most 1: min_lr is reached at step total_steps, one past the
// last. Throws Error for an unknown schedule or a negative step.
double learning_rate(const OptimizerConfig& config, int64_t step, int64_t total_steps);

}  // namespace twobp
