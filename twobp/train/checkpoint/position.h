// The position of a training run, in addition to its weights and optimizer state.
#pragma once

#include <cstdint>

namespace twobp {

struct TrainingPosition {
  int64_t step = 0;        // steps done, including those with a skipped update
  int64_t batches = 0;     // batches taken from the loader
  double loss_scale = 1;   // of fp16
  int64_t good_steps = 0;  // since the loss scale last changed
};

}  // namespace twobp
