// LLaMa (arXiv 2302.13971) from split layers: embedding, then per block an attention half and an MLP half
// (layers of their own, so that a stage may end between them), then a head: norm, projection, cross-entropy.
// Parameter names are those of Hugging Face's LlamaForCausalLM.
#pragma once

#include <ATen/ATen.h>

#include "twobp/nn/layers/lora_linear.h"
#include "twobp/nn/layers/rope.h"
#include "twobp/models/model.h"

namespace twobp {

struct LlamaOptions {
  int64_t vocab = 256;
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 4;
  int64_t head_dim = 64;
  int64_t hidden = 704;
  double norm_eps = 1e-5;
  RopeSettings rope;
  bool tied = false;  // the head's projection is the embedding matrix
  double init_std = 0.02;
  at::ScalarType dtype = at::kFloat;
  LoraOptions lora;  // with a rank, all but the adapters is frozen
};

ModelSpec llama(const LlamaOptions& options);

// A stack of `layers` identical MLP halves with a squared error at the end: equal stages, for benchmarks.
struct MlpOptions {
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t hidden = 704;
  double norm_eps = 1e-5;
  double init_std = 0.02;
  at::ScalarType dtype = at::kFloat;
  LoraOptions lora;
};

ModelSpec mlp(const MlpOptions& options);

}  // namespace twobp
