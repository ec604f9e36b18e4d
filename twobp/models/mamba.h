// Mamba (arXiv 2312.00752) as a language model: embedding, then blocks of norm, mixer and residual, each as
// two layers (up to the mixer's first projection, and the rest), then a head: norm, projection,
// cross-entropy. Parameter names are those of Hugging Face's MambaForCausalLM.
#pragma once

#include "twobp/nn/layers/lora_linear.h"
#include "twobp/models/model.h"

namespace twobp {

struct MambaOptions {
  int64_t vocab = 256;
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t state = 16;  // numbers a channel of the scan
  int64_t conv_kernel = 4;
  int64_t expand = 2;   // channels of the scan: expand * dim
  int64_t dt_rank = 0;  // 0: dim / 16 rounded up
  double norm_eps = 1e-5;
  bool tied = true;  // the head's projection is the embedding matrix
  double init_std = 0.02;
  at::ScalarType dtype = at::kFloat;
  LoraOptions lora;  // with a rank, all but the adapters is frozen
};

ModelSpec mamba(const MambaOptions& options);

}  // namespace twobp
