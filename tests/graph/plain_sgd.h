// This update shows the gradients: w -= dL/dw.
#pragma once

#include "twobp/train/config.h"

namespace twobp::test {

inline void use_plain_sgd(Config& config) {
  config.optimizer.type = "sgd";
  config.optimizer.lr = 1;
  config.optimizer.momentum = 0;
  config.optimizer.weight_decay = 0;
  config.optimizer.schedule = "constant";
  config.optimizer.warmup = 0;
  config.optimizer.min_lr = 0;
  config.train.clip_norm = 0;
}

}  // namespace twobp::test
