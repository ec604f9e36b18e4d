// The options of a decoder: the keys of `model` that vary within one of its families (family.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace twobp {

struct DecoderOptions {
  static constexpr const char* kType = "llama";  // of options that are given without a model.type

  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: dim / heads
  int64_t hidden = 0;    // width of the MLP; 0: see filled_in
  int64_t experts = 0;   // in place of each MLP (nn/layers/experts.h); 0: MLPs
  int64_t experts_per_token = 2;
  bool normalized_routing = false;  // whether the weights of a token's experts sum to 1
  double balance_loss = 0;          // factor of the loss that balances experts (nn/layers/balance.h)
  int64_t shared_hidden = 0;        // width of an expert that all tokens share; 0: none
  int64_t vocab = 256;
  double norm_eps = 1e-5;
  std::string activation = "silu";  // of the MLP: silu, gelu, gelu_tanh
  bool attention_bias = false;
  bool mlp_bias = false;
  int64_t positions = 1024;  // learned ones
  double rope_theta = 10000;
  std::string rope_scaling = "none";  // see nn/layers/rope.h, also for the keys below
  double rope_factor = 1;
  double rope_low_freq = 1;               // llama3
  double rope_high_freq = 4;              // llama3
  double rope_original_positions = 8192;  // llama3, yarn, dynamic, longrope
  double rope_beta_fast = 32;             // yarn
  double rope_beta_slow = 1;              // yarn
  bool rope_whole_pairs = true;           // yarn
  double rope_attention_factor = 0;       // yarn, longrope
  std::vector<double> rope_short;         // longrope
  std::vector<double> rope_long;          // longrope
  double rope_local_theta = 10000;        // of layers with a window, which are not stretched
  double rope_part = 1;                   // of a head's features that turn
  std::vector<int> rope_layers;           // cyclic: 1 for layers that turn, 0 for others; empty: all turn
  std::vector<int> windows;               // cyclic: keys that a layer's query sees, 0: all; empty: 0
  double attention_scale = 0;             // of the scores; 0: 1 / sqrt(head_dim)
  double attention_cap = 0;               // soft cap of the scores; 0: none
  double logit_cap = 0;                   // soft cap of the logits; 0: none
  double embedding_scale = 1;
  double residual_scale = 1;
  double logit_scale = 1;
  bool parallel = false;  // attention and MLP read the same x
  double dropout = 0;     // after each half of a block
  double attention_dropout = 0;
  bool tied = false;       // the head's projection shares the embedding matrix
  int64_t pad_token = -1;  // its embedding is not trained; -1: none
  double init_std = 0.02;
};

}  // namespace twobp
