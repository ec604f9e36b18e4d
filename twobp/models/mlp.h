// A stack of identical MLP halves of LLaMa blocks with a squared error at the end. It gives equal stages for
// benchmarks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "twobp/models/model_type.h"

namespace twobp {

struct MlpOptions {
  static constexpr const char* kType = "mlp";

  int64_t dim = 256;
  int64_t layers = 4;
  int64_t hidden = 0;  // 0: dim * 8 / 3 rounded up to a multiple of 64
  double norm_eps = 1e-5;
  double init_std = 0.02;
};

// Reads `input` (B, S, dim) or (B, dim) and `target` of the same shape.
ModelSpec mlp(const MlpOptions& options, const BuildSettings& settings = {});

ModelType mlp_type();

}  // namespace twobp
