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
  int64_t q_rank =
      0;  // latent attention (nn/layers/latent_projections.h): width of compressed queries; 0: they are not
  int64_t kv_rank = 64;          // width of compressed keys and values
  int64_t nope_dim = 32;         // features of a query's and a key's head that do not turn
  int64_t rope_dim = 16;         // those that do
  int64_t value_dim = 32;        // width of a value's head
  bool rope_interleaved = true;  // pairs of features that turn are neighbours
  int64_t hidden = 0;            // width of the MLP, or of an expert; 0: see filled_in
  int64_t experts = 0;           // in place of each MLP (nn/layers/experts.h); 0: MLPs
  int64_t experts_per_token = 2;
  bool normalized_routing = false;  // whether the weights of a token's experts sum to 1
  double balance_loss = 0;          // factor of the loss that balances experts (nn/layers/balance.h)
  double balance_rate = 0;          // by which a step changes the correction of a router's scores; 0: none
  int64_t shared_hidden = 0;        // width of an expert that all tokens share; 0: none
  int64_t shared_experts = 0;       // that width in widths of an expert
  int64_t dense_layers = 0;         // first blocks that have an MLP in place of experts
  int64_t dense_hidden = 0;         // its width; 0: see filled_in
  int64_t expert_groups = 1;        // of experts, of which a token chooses its experts from some
  int64_t chosen_groups = 1;        // so many
  double routed_scale = 1;          // factor of the experts' weights
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
  double rope_mscale = 0;                 // yarn, latent attention: m in the scores' factor (0.1 m ln(factor) + 1)^2
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
