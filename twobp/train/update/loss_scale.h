// The factor of all gradients in float16. It keeps small gradients from being lost (arXiv 1710.03740, section 3.2).
#pragma once

#include <cstdint>

namespace twobp {

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
