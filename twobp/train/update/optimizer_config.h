// The section `optimizer` of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/config/section.h"

namespace twobp {

struct OptimizerConfig {
  std::string type = "adamw";  // adamw, adam, sgd
  double lr = 3e-4;
  double weight_decay = 0.01;
  std::vector<std::string> weight_decay_of;  // PATTERN=DECAY, in place of weight_decay
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0.0;            // sgd
  bool shard = false;               // data parallel: each replica keeps and updates its share (ZeRO stage 1)
  std::string schedule = "cosine";  // constant, linear, cosine
  int64_t warmup = 0;               // steps
  double min_lr = 0.0;              // final rate of linear and cosine
};

const Section& optimizer_section();

}  // namespace twobp
