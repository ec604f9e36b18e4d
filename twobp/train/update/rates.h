// What changes from step to step: the learning rate, and the factor of gradients in float16.
#pragma once

#include <cstdint>

#include "twobp/train/config.h"

namespace twobp {

// The learning rate of step `step`, counted from 0, of a run of `total_steps`. With w = warmup:
//   step < w       lr * (step + 1) / (w + 1): no step has rate 0, and step w is the first at lr
//   constant       lr
//   linear         lr + (min_lr - lr) * p
//   cosine         min_lr + (lr - min_lr) * (1 + cos(pi * p)) / 2
//   wsd            lr up to step total_steps - decay, then linear
//   inverse_sqrt   lr * sqrt(t / (t + step - w)), with t = w, or 10000 without warm-up
// where p = (step - begin) / (total_steps - begin), at most 1, and the fall begins at w, or with wsd (warm-up, stable,
// decay; arXiv 2404.06395, section 4) at total_steps - decay, but not before w. min_lr is reached at step total_steps,
// one past the last. inverse_sqrt is transformers' get_inverse_sqrt_schedule. Throws Error for an unknown schedule or a
// negative step.
double learning_rate(const OptimizerConfig& config, int64_t step, int64_t total_steps);

// The factor of all gradients in float16. It keeps small gradients from being lost (arXiv 1710.03740, section 3.2).
struct LossScale {
  bool adapts = false;  // true for training in float16
  double value = 1;
  int64_t good_steps = 0;  // since the scale last changed

  // Called after a step. `overflowed`: its gradients were not finite, so it was skipped.
  void adapt(bool overflowed) {
    if (!adapts) return;
    if (overflowed) {
      value /= 2;
      good_steps = 0;
    } else if (++good_steps == kGrowthSteps) {
      value *= 2;
      good_steps = 0;
    }
  }

  static constexpr int64_t kGrowthSteps = 2000;
};

}  // namespace twobp
