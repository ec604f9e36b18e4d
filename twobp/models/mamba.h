// Mamba (arXiv 2312.00752) as a language model: an embedding, blocks and a head. A block is norm, mixer and residual,
// split into two layers (up to the mixer's first projection, and the rest). The head is norm, projection and
// cross-entropy. Parameter names are those of Hugging Face's MambaForCausalLM.
#pragma once

#include <cstdint>

#include "twobp/models/model_type.h"

namespace twobp {

struct MambaOptions {
  static constexpr const char* kType = "mamba";

  int64_t dim = 256;
  int64_t layers = 4;
  int64_t vocab = 256;
  double norm_eps = 1e-5;
  bool tied = false;        // the head's projection shares the embedding matrix
  int64_t state = 16;       // numbers per channel of the scan
  int64_t conv_kernel = 4;  // positions
  int64_t expand = 2;       // channels of the scan: expand * dim
  int64_t dt_rank = 0;      // width of the steps' projection; 0: dim / 16 rounded up
  double init_std = 0.02;
};

ModelSpec mamba(const MambaOptions& options, const BuildSettings& settings = {});

ModelType mamba_type();

}  // namespace twobp
