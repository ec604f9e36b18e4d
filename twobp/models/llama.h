// LLaMa (arXiv 2302.13971), made of split layers: an embedding, blocks and a head. A block is an attention
// half and an MLP half. The halves are separate layers, so that a stage may end between them. The head is
// norm, projection and cross-entropy. Parameter names are those of Hugging Face's LlamaForCausalLM.
#pragma once

#include <cstdint>
#include <string>

#include "twobp/models/model_type.h"

namespace twobp {

struct LlamaOptions {
  static constexpr const char* kType = "llama";

  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: dim / heads
  int64_t hidden = 0;    // width of the MLP; 0: dim * 8 / 3 rounded up to a multiple of 64
  int64_t vocab = 256;
  double norm_eps = 1e-5;
  double rope_theta = 10000;
  std::string rope_scaling = "none";  // linear, llama3: see nn/layers/rope.h, also for the keys below
  double rope_factor = 1;
  double rope_low_freq = 1;               // llama3
  double rope_high_freq = 4;              // llama3
  double rope_original_positions = 8192;  // llama3
  bool tied = false;                      // the head's projection shares the embedding matrix
  int64_t pad_token = -1;                 // its embedding is not trained; -1: none
  double init_std = 0.02;
};

ModelSpec llama(const LlamaOptions& options, const BuildSettings& settings = {});

ModelType llama_type();

}  // namespace twobp
