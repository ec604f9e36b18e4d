// The factor that all gradients carry in float16, so that small ones are not lost there
// (arXiv 1710.03740, section 3.2).
#pragma once

#include <cstdint>

namespace twobp {

struct LossScale {
  bool adapts = false;  // it is float16 that is trained in
  double value = 1;
  int64_t good_steps = 0;  // since it last changed

  // After a step; `overflowed`: its gradients were not finite, so that it was skipped.
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
