// The section `optimizer` of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/config/section.h"

namespace twobp {

struct OptimizerConfig {
  std::string type = "adamw";  // adamw, adam, sgd, muon
  double lr = 3e-4;
  double weight_decay = 0.01;
  std::vector<std::string> groups = {};  // PATTERN KEY=VALUE...: see parameter_groups.h
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0.0;            // sgd
  double muon_momentum = 0.95;      // muon
  double average = 0;               // decay of the running mean of the weights; 0: none
  bool shard = false;               // data parallel: each replica keeps and updates its share (ZeRO stage 1)
  std::string schedule = "cosine";  // constant, linear, cosine, wsd, inverse_sqrt
  int64_t warmup = 0;               // steps
  int64_t decay = 0;                // wsd: steps of the fall at the end; 0: a tenth of the run
  double min_lr = 0.0;              // final rate of linear, cosine and wsd
};

const Section& optimizer_section();

}  // namespace twobp
