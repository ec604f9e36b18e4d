// Where a training run is, beside its weights and optimizer state.
#pragma once

#include <cstdint>

namespace twobp {

struct TrainingPosition {
  int64_t step = 0;        // steps done, those whose update was skipped included
  int64_t batches = 0;     // batches taken from the loader
  double loss_scale = 1;   // fp16's
  int64_t good_steps = 0;  // since it last changed
};

}  // namespace twobp
