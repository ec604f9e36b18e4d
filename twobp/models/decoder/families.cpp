// The table of families. The values of missing keys are those of the classes in transformers 5.
#include <algorithm>
#include <cstdlib>

#include "twobp/core/check.h"
#include "twobp/models/decoder/family.h"

namespace twobp {
namespace {

// The keys that most families have, with `more`. `eps` is that of the norms.
std::vector<FileKey> file_keys(FileKey eps, std::vector<FileKey> more, bool width = true) {
  std::vector<FileKey> keys = {
      {"hidden_size", "dim"}, {"num_hidden_layers", "layers"}, {"num_attention_heads", "heads"}};
  if (width) keys.push_back({"intermediate_size", "hidden"});  // else it is of experts, or of some layers
  keys.push_back({"vocab_size", "vocab"});
  keys.push_back({"attention_dropout", "attention_dropout", "0"});
  keys.push_back(eps);
  for (const FileKey& key : more) keys.push_back(key);
  return keys;
}

std::string from_gpt2(const std::string& stored) {
  // The causal mask, and names of files that were saved without the head.
  if (stored.ends_with(".attn.bias") || stored.ends_with(".attn.masked_bias")) return "";
  const bool bare = stored.starts_with("h.") || stored.starts_with("wte.") || stored.starts_with("wpe.") ||
                    stored.starts_with("ln_f.");
  return bare ? "transformer." + stored : stored;
}

std::string from_gpt_neox(const std::string& stored) {
  const bool mask = stored.ends_with(".attention.bias") || stored.ends_with(".attention.masked_bias");
  if (mask) return "";
  return stored == "lm_head.weight" ? "embed_out.weight" : stored;  // the module's name in transformers 5
}

constexpr FileKey kRmsEps = {"rms_norm_eps", "norm_eps", "1e-6"};
constexpr FileKey kSilu = {"hidden_act", "activation", "\"silu\""};
constexpr FileKey kUntied = {"tie_word_embeddings", "tied", "false"};
constexpr FileKey kTied = {"tie_word_embeddings", "tied", "true"};
constexpr FileKey kHeadDim = {"head_dim", "head_dim", "0"};
constexpr FileKey kAttentionBias = {"attention_bias", "attention_bias", "false"};
constexpr FileKey kMlpBias = {"mlp_bias", "mlp_bias", "false"};

constexpr FileKey kBalanceLoss = {"router_aux_loss_coef", "balance_loss", "0.001", FileForm::kWithLogits};

std::string replaced(std::string name, const std::string& from, const std::string& to) {
  const size_t at = name.find(from);
  return at == std::string::npos ? name : name.replace(at, from.size(), to);
}

// The modules' names in transformers 5.
std::string from_mixtral(const std::string& stored) {
  return replaced(stored, ".mlp.", ".block_sparse_moe.");
}

std::string from_granitemoe(const std::string& stored) {
  const std::string block = ".block_sparse_moe.";
  std::string name = replaced(stored, block + "experts.gate_up_proj", block + "input_linear.weight");
  name = replaced(std::move(name), block + "experts.down_proj", block + "output_linear.weight");
  return replaced(std::move(name), block + "router.weight", block + "router.layer.weight");
}

DecoderFamily llama_family() {
  DecoderFamily f{.name = "llama", .hf_class = "LlamaForCausalLM"};
  f.file = file_keys(kRmsEps,
                     {{"num_key_value_heads", "kv_heads", "0"}, kHeadDim, kSilu, kUntied, kAttentionBias, kMlpBias});
  f.equal_heads = true;
  return f;
}

DecoderFamily mistral_family() {
  DecoderFamily f{.name = "mistral", .hf_class = "MistralForCausalLM"};
  f.file = file_keys(kRmsEps, {{"num_key_value_heads", "kv_heads", "8"}, kHeadDim, kSilu, kUntied});
  f.windows = WindowsInFile::kEvery;
  f.default_window = "4096";
  return f;
}

DecoderFamily qwen2_family() {
  DecoderFamily f{.name = "qwen2", .hf_class = "Qwen2ForCausalLM"};
  f.file = file_keys(kRmsEps, {{"num_key_value_heads", "kv_heads", "32"}, kHeadDim, kSilu, kUntied});
  f.defaults.attention_bias = true;
  f.output_bias = false;
  f.windows = WindowsInFile::kSwitched;
  f.default_window = "4096";
  return f;
}

DecoderFamily qwen3_family() {
  DecoderFamily f{.name = "qwen3", .hf_class = "Qwen3ForCausalLM"};
  f.file = file_keys(
      kRmsEps,
      {{"num_key_value_heads", "kv_heads", "32"}, {"head_dim", "head_dim", "128"}, kSilu, kUntied, kAttentionBias});
  f.names.query_norm = "self_attn.q_norm";
  f.names.key_norm = "self_attn.k_norm";
  f.windows = WindowsInFile::kSwitched;
  f.default_window = "4096";
  return f;
}

DecoderFamily phi3_family() {
  DecoderFamily f{.name = "phi3", .hf_class = "Phi3ForCausalLM"};
  f.file =
      file_keys({"rms_norm_eps", "norm_eps", "1e-5"},
                {{"num_key_value_heads", "kv_heads", "0"}, kHeadDim, kSilu, kUntied, {"resid_pdrop", "dropout", "0"}});
  f.names.qkv = {"self_attn.qkv_proj"};
  f.names.mlp_input = {"mlp.gate_up_proj"};
  f.scalings = {"longrope"};
  f.part = "partial_rotary_factor";
  f.windows = WindowsInFile::kEvery;
  f.default_pad_token = 32000;
  f.ignored = {"embd_pdrop"};
  return f;
}

DecoderFamily olmo2_family() {
  DecoderFamily f{.name = "olmo2", .hf_class = "Olmo2ForCausalLM"};
  f.file = file_keys({"rms_norm_eps", "norm_eps", "1e-5"},
                     {{"num_key_value_heads", "kv_heads", "0"}, kHeadDim, kSilu, kUntied, kAttentionBias});
  f.names.attention_norm = "";
  f.names.attention_after_norm = "post_attention_layernorm";
  f.names.query_norm = "self_attn.q_norm";
  f.names.key_norm = "self_attn.k_norm";
  f.names.mlp_norm = "";
  f.names.mlp_after_norm = "post_feedforward_layernorm";
  f.whole_head_norm = true;
  f.default_pad_token = 1;
  return f;
}

DecoderFamily gemma1_family() {
  DecoderFamily f{.name = "gemma", .hf_class = "GemmaForCausalLM"};
  f.file = file_keys(kRmsEps, {{"num_key_value_heads", "kv_heads", "16"},
                               {"head_dim", "head_dim", "256"},
                               {"hidden_act", nullptr, "\"gelu_pytorch_tanh\"", FileForm::kTanhGelu},
                               kTied,
                               kAttentionBias});
  f.defaults.activation = "gelu_tanh";
  f.defaults.tied = true;
  f.norm = DecoderFamily::Norm::kRmsOnePlus;
  f.scaled_embedding = true;
  f.default_pad_token = 0;
  f.ignored = {"hidden_activation"};  // of early files
  return f;
}

// What the second and the third generation share.
DecoderFamily gemma(const char* name, const char* hf_class, const char* logit_cap, FileKey attention_cap) {
  DecoderFamily f{.name = name, .hf_class = hf_class};
  f.file = file_keys(kRmsEps, {{"num_key_value_heads", "kv_heads", "4"},
                               {"head_dim", "head_dim", "256"},
                               {"hidden_activation", "activation", "\"gelu_pytorch_tanh\""},
                               kTied,
                               kAttentionBias,
                               {"query_pre_attn_scalar", "attention_scale", "256", FileForm::kInverseRoot},
                               {"final_logit_softcapping", "logit_cap", logit_cap, FileForm::kOrNull},
                               attention_cap});
  f.names.attention_after_norm = "post_attention_layernorm";
  f.names.mlp_norm = "pre_feedforward_layernorm";
  f.names.mlp_after_norm = "post_feedforward_layernorm";
  f.defaults.activation = "gelu_tanh";
  f.defaults.tied = true;
  f.norm = DecoderFamily::Norm::kRmsOnePlus;
  f.scaled_embedding = true;
  f.equal_heads = true;
  f.windows = WindowsInFile::kAlternating;
  f.default_window = "4096";
  f.default_pad_token = 0;
  f.ignored = {"hidden_act"};  // of early files, which also have hidden_activation
  return f;
}

DecoderFamily gemma2_family() {
  DecoderFamily f = gemma("gemma2", "Gemma2ForCausalLM", "30.0",
                          {"attn_logit_softcapping", "attention_cap", "50.0", FileForm::kOrNull});
  f.defaults.logit_cap = 30;
  f.defaults.attention_cap = 50;
  return f;
}

DecoderFamily gemma3_family() {
  DecoderFamily f = gemma("gemma3_text", "Gemma3ForCausalLM", "null",
                          // transformers has the key, but computes no cap
                          {"attn_logit_softcapping", nullptr, "null"});
  f.names.query_norm = "self_attn.q_norm";
  f.names.key_norm = "self_attn.k_norm";
  f.defaults.rope_theta = 1e6;
  f.default_theta = 1e6;
  f.local_rope = true;
  f.window_pattern = 6;
  return f;
}

DecoderFamily smollm3_family() {
  DecoderFamily f{.name = "smollm3", .hf_class = "SmolLM3ForCausalLM"};
  f.file =
      file_keys(kRmsEps, {{"num_key_value_heads", "kv_heads", "4"}, kHeadDim, kSilu, kTied, kAttentionBias, kMlpBias});
  f.defaults.tied = true;
  f.defaults.rope_layers = {1, 1, 1, 0};
  f.default_theta = 2e6;
  f.windows = WindowsInFile::kNotRotary;
  f.default_pad_token = 128004;
  f.ignored = {"max_window_layers"};
  return f;
}

DecoderFamily gpt2_family() {
  DecoderFamily f{.name = "gpt2", .hf_class = "GPT2LMHeadModel"};
  f.file = {{"n_embd", "dim", "768"},
            {"n_layer", "layers", "12"},
            {"n_head", "heads", "12"},
            {"n_inner", "hidden", "null", FileForm::kOrNull},
            {"vocab_size", "vocab", "50257"},
            {"n_positions", "positions", "1024"},
            {"layer_norm_epsilon", "norm_eps", "1e-5"},
            {"activation_function", "activation", "\"gelu_new\""},
            {"resid_pdrop", "dropout", "0.1"},
            {"embd_pdrop", "dropout", "0.1"},
            {"attn_pdrop", "attention_dropout", "0.1"},
            kTied,
            {"scale_attn_weights", nullptr, "true"}};
  f.names = {.embedding = "transformer.wte",
             .positions = "transformer.wpe",
             .blocks = "transformer.h.",
             .attention_norm = "ln_1",
             .qkv = {"attn.c_attn"},
             .attention_output = "attn.c_proj",
             .mlp_norm = "ln_2",
             .mlp_input = {"mlp.c_fc"},
             .mlp_output = "mlp.c_proj",
             .norm = "transformer.ln_f"};
  f.defaults.activation = "gelu_tanh";
  f.defaults.attention_bias = f.defaults.mlp_bias = f.defaults.tied = true;
  f.norm = DecoderFamily::Norm::kLayerNorm;
  f.gated = false;
  f.transposed = true;
  f.embedding_dropout = true;
  f.rotary = false;
  f.has_pad_token = false;
  f.ignored = {"n_ctx",
               "reorder_and_upcast_attn",
               "summary_type",
               "summary_use_proj",
               "summary_activation",
               "summary_proj_to_labels",
               "summary_first_dropout"};
  f.rename = from_gpt2;
  return f;
}

DecoderFamily gpt_neox_family() {
  DecoderFamily f{.name = "gpt_neox", .hf_class = "GPTNeoXForCausalLM"};
  f.file = file_keys({"layer_norm_eps", "norm_eps", "1e-5"}, {{"hidden_act", "activation", "\"gelu\""},
                                                              kUntied,
                                                              {"use_parallel_residual", "parallel", "true"},
                                                              {"attention_bias", "attention_bias", "true"},
                                                              {"hidden_dropout", "dropout", "0"}});
  f.names = {.embedding = "gpt_neox.embed_in",
             .blocks = "gpt_neox.layers.",
             .qkv = {"attention.query_key_value"},
             .attention_output = "attention.dense",
             .mlp_input = {"mlp.dense_h_to_4h"},
             .mlp_output = "mlp.dense_4h_to_h",
             .norm = "gpt_neox.final_layer_norm",
             .head = "embed_out"};
  f.defaults.activation = "gelu";
  f.defaults.attention_bias = f.defaults.mlp_bias = f.defaults.parallel = true;
  f.defaults.rope_part = 0.25;
  f.norm = DecoderFamily::Norm::kLayerNorm;
  f.gated = false;
  f.interleaved = true;
  f.embedding_dropout = true;
  f.theta = "rotary_emb_base";
  f.part = "rotary_pct";
  f.default_part = 0.25;
  f.has_pad_token = false;
  f.ignored = {"classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"};
  f.rename = from_gpt_neox;
  return f;
}

DecoderFamily granite_family() {
  DecoderFamily f{.name = "granite", .hf_class = "GraniteForCausalLM"};
  f.file = file_keys(kRmsEps, {{"num_key_value_heads", "kv_heads", "0"},
                               kHeadDim,
                               kSilu,
                               kUntied,
                               kAttentionBias,
                               kMlpBias,
                               {"embedding_multiplier", "embedding_scale", "1.0"},
                               {"logits_scaling", "logit_scale", "1.0", FileForm::kInverse},
                               {"residual_multiplier", "residual_scale", "1.0"},
                               {"attention_multiplier", "attention_scale", "1.0"}});
  return f;
}

DecoderFamily stablelm_family() {
  DecoderFamily f{.name = "stablelm", .hf_class = "StableLmForCausalLM"};
  f.file = file_keys({"layer_norm_eps", "norm_eps", "1e-5"}, {{"num_key_value_heads", "kv_heads", "32"},
                                                              kSilu,
                                                              kUntied,
                                                              {"use_qkv_bias", "attention_bias", "false"},
                                                              {"qk_layernorm", nullptr, "false"},
                                                              {"use_parallel_residual", nullptr, "false"},
                                                              {"hidden_dropout", nullptr, "0.0"}});
  f.defaults.rope_part = 0.25;
  f.norm = DecoderFamily::Norm::kLayerNorm;
  f.output_bias = false;
  f.part = "partial_rotary_factor";
  f.default_part = 0.25;
  return f;
}

DecoderFamily starcoder2_family() {
  DecoderFamily f{.name = "starcoder2", .hf_class = "Starcoder2ForCausalLM"};
  f.file = file_keys({"norm_epsilon", "norm_eps", "1e-5"}, {{"num_key_value_heads", "kv_heads", "2"},
                                                            {"hidden_act", "activation", "\"gelu_pytorch_tanh\""},
                                                            kTied,
                                                            {"use_bias", "attention_bias", "true"},
                                                            {"use_bias", "mlp_bias", "true"},
                                                            {"residual_dropout", "dropout", "0"},
                                                            {"embedding_dropout", "dropout", "0"}});
  f.names.mlp_input = {"mlp.c_fc"};
  f.names.mlp_output = "mlp.c_proj";
  f.defaults.activation = "gelu_tanh";
  f.defaults.attention_bias = f.defaults.mlp_bias = f.defaults.tied = true;
  f.norm = DecoderFamily::Norm::kLayerNorm;
  f.gated = false;
  f.embedding_dropout = true;
  f.windows = WindowsInFile::kEvery;
  f.ignored = {"mlp_type", "norm_type"};
  return f;
}

DecoderFamily mixtral_family() {
  DecoderFamily f{.name = "mixtral", .hf_class = "MixtralForCausalLM"};
  f.file = file_keys({"rms_norm_eps", "norm_eps", "1e-5"}, {{"num_key_value_heads", "kv_heads", "8"},
                                                            kHeadDim,
                                                            kSilu,
                                                            kUntied,
                                                            {"num_local_experts", "experts", "8"},
                                                            {"num_experts_per_tok", "experts_per_token", "2"},
                                                            kBalanceLoss,
                                                            {"router_jitter_noise", nullptr, "0.0"}});
  f.names.router = "block_sparse_moe.gate";
  f.names.experts = "block_sparse_moe.experts.";
  f.names.expert = {"w1", "w3", "w2"};
  f.names.stacks = {"block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"};
  f.rename = from_mixtral;
  f.defaults.experts = 8;
  f.defaults.normalized_routing = true;
  f.default_theta = 1e6;
  f.windows = WindowsInFile::kEvery;
  return f;
}

// What the second and the third generation share. Dense layers and windows are refused.
DecoderFamily qwen_moe(const char* name, const char* hf_class, const std::vector<FileKey>& more) {
  DecoderFamily f{.name = name, .hf_class = hf_class};
  f.file = file_keys(kRmsEps,
                     {kHeadDim,
                      kSilu,
                      kUntied,
                      {"norm_topk_prob", "normalized_routing", "false"},
                      kBalanceLoss,
                      {"decoder_sparse_step", nullptr, "1"},
                      {"use_sliding_window", nullptr, "false"}},
                     /*width=*/false);
  f.file.insert(f.file.end(), more.begin(), more.end());
  f.defaults.experts = 8;
  f.ignored = {"intermediate_size", "sliding_window", "max_window_layers"};
  return f;
}

DecoderFamily qwen2_moe_family() {
  DecoderFamily f = qwen_moe("qwen2_moe", "Qwen2MoeForCausalLM",
                             {{"num_key_value_heads", "kv_heads", "16"},
                              {"moe_intermediate_size", "hidden", "1408"},
                              {"shared_expert_intermediate_size", "shared_hidden", "5632"},
                              {"qkv_bias", "attention_bias", "true"},
                              {"num_experts", "experts", "60", FileForm::kSame, "num_local_experts"},
                              {"num_experts_per_tok", "experts_per_token", "4"}});
  f.defaults.attention_bias = true;
  f.defaults.shared_hidden = 256;
  f.output_bias = false;
  return f;
}

DecoderFamily qwen3_moe_family() {
  DecoderFamily f = qwen_moe("qwen3_moe", "Qwen3MoeForCausalLM",
                             {{"num_key_value_heads", "kv_heads", "4"},
                              {"moe_intermediate_size", "hidden", "768"},
                              kAttentionBias,
                              {"num_experts", "experts", "128", FileForm::kSame, "num_local_experts"},
                              {"num_experts_per_tok", "experts_per_token", "8"}});
  f.names.query_norm = "self_attn.q_norm";
  f.names.key_norm = "self_attn.k_norm";
  return f;
}

DecoderFamily olmoe_family() {
  DecoderFamily f{.name = "olmoe", .hf_class = "OlmoeForCausalLM"};
  f.file = file_keys({"rms_norm_eps", "norm_eps", "1e-5"},
                     {{"num_key_value_heads", "kv_heads", "0"},
                      kSilu,
                      kUntied,
                      kAttentionBias,
                      {"num_experts", "experts", "64"},
                      {"num_experts_per_tok", "experts_per_token", "8"},
                      {"norm_topk_prob", "normalized_routing", "false"},
                      {"router_aux_loss_coef", "balance_loss", "0.01", FileForm::kWithLogits}});
  f.names.query_norm = "self_attn.q_norm";
  f.names.key_norm = "self_attn.k_norm";
  f.whole_head_norm = true;
  f.equal_heads = true;
  f.defaults.experts = 8;
  f.default_pad_token = 1;
  return f;
}

DecoderFamily granitemoe_family() {
  DecoderFamily f = granite_family();
  f.name = "granitemoe";
  f.hf_class = "GraniteMoeForCausalLM";
  std::erase_if(f.file, [](const FileKey& key) { return std::string(key.name) == "mlp_bias"; });
  std::erase_if(f.file, [](const FileKey& key) { return std::string(key.name) == "head_dim"; });
  f.file.insert(
      f.file.end(),
      {{"num_local_experts", "experts", "8"}, {"num_experts_per_tok", "experts_per_token", "2"}, kBalanceLoss});
  f.names.router = "block_sparse_moe.router.layer";
  f.names.experts = "block_sparse_moe.experts.";
  f.names.stacks = {"block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"};
  f.names.expert_modules = {"block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"};
  f.defaults.experts = 8;
  f.defaults.normalized_routing = true;  // a softmax over the chosen logits
  f.saves_stacks = true;
  f.rename = from_granitemoe;
  return f;
}

DecoderFamily gpt_oss_family() {
  DecoderFamily f{.name = "gpt_oss", .hf_class = "GptOssForCausalLM"};
  f.file = file_keys({"rms_norm_eps", "norm_eps", "1e-5"},
                     {{"num_key_value_heads", "kv_heads", "8"},
                      {"head_dim", "head_dim", "64"},
                      {"hidden_act", nullptr, "\"silu\""},
                      kUntied,
                      {"attention_bias", "attention_bias", "true"},
                      {"num_local_experts", "experts", "128", FileForm::kSame, "num_experts"},
                      {"num_experts_per_tok", "experts_per_token", "4", FileForm::kSame, "experts_per_token"},
                      kBalanceLoss,
                      {"swiglu_alpha", nullptr, "1.702"},
                      {"swiglu_limit", nullptr, "7.0"}});
  f.names.sinks = "self_attn.sinks";
  f.names.router = "mlp.router";
  f.defaults.experts = 8;
  f.defaults.attention_bias = f.defaults.normalized_routing = true;
  f.biased_experts = true;
  f.gate_limit = 7;
  f.saves_stacks = f.stacks_in_out = true;
  f.scalings = {"yarn"};
  f.default_theta = 150000;
  f.default_rope =
      R"({"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "truncate": false})";
  f.windows = WindowsInFile::kAlternating;
  f.default_window = "128";
  f.ignored = {"initial_context_length"};
  return f;
}

// What the second and the third generation share: latent attention, experts of groups, shared ones, dense first layers.
DecoderFamily deepseek(const char* name, const char* hf_class, const std::vector<FileKey>& more) {
  DecoderFamily f{.name = name, .hf_class = hf_class};
  f.file = file_keys(kRmsEps,
                     {kSilu,
                      kUntied,
                      kAttentionBias,
                      {"q_lora_rank", "q_rank", "1536", FileForm::kOrNull},
                      {"kv_lora_rank", "kv_rank", "512"},
                      {"qk_nope_head_dim", "nope_dim", "128"},
                      {"qk_rope_head_dim", "rope_dim", "64"},
                      {"v_head_dim", "value_dim", "128"},
                      {"num_experts_per_tok", "experts_per_token"},
                      {"moe_layer_freq", nullptr, "1"}},
                     /*width=*/false);
  f.file.insert(f.file.end(), more.begin(), more.end());
  f.names.qkv = {"self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa",
                 "self_attn.kv_b_proj"};
  f.names.query_norm = "self_attn.q_a_layernorm";
  f.names.key_norm = "self_attn.kv_a_layernorm";
  f.names.shared_expert = "mlp.shared_experts.";
  f.names.shared_gate = "";
  f.defaults.q_rank = 96;
  f.defaults.experts = 8;
  f.defaults.shared_experts = f.defaults.dense_layers = 1;
  f.latent = true;
  f.scalings = {"yarn"};
  f.ignored = {"head_dim",      "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers",
               "num_mtp_layers"};
  return f;
}

DecoderFamily deepseek_v2_family() {
  DecoderFamily f = deepseek("deepseek_v2", "DeepseekV2ForCausalLM",
                             {{"num_key_value_heads", "kv_heads", "null"},
                              kMlpBias,
                              {"intermediate_size", "dense_hidden", "11008"},
                              {"moe_intermediate_size", "hidden", "1407"},
                              {"first_k_dense_replace", "dense_layers", "0", FileForm::kOrZero},
                              {"n_routed_experts", "experts", "64", FileForm::kSame, "num_experts"},
                              {"n_shared_experts", "shared_experts", "2"},
                              {"n_group", "expert_groups", "null"},
                              {"topk_group", "chosen_groups", "null"},
                              {"topk_method", "expert_groups", "\"greedy\"", FileForm::kLimited},
                              {"routed_scaling_factor", "routed_scale", "1.0"},
                              // transformers has the key, but divides by no sum
                              {"norm_topk_prob", nullptr, "false"},
                              {"scoring_func", nullptr, "\"softmax\""}});
  f.equal_heads = true;
  return f;
}

DecoderFamily deepseek_v3_family() {
  DecoderFamily f = deepseek("deepseek_v3", "DeepseekV3ForCausalLM",
                             {{"num_key_value_heads", "kv_heads", "128"},
                              {"intermediate_size", "dense_hidden", "18432"},
                              {"moe_intermediate_size", "hidden", "2048"},
                              {"first_k_dense_replace", "dense_layers", "3", FileForm::kOrZero},
                              {"n_routed_experts", "experts", "256", FileForm::kSame, "num_local_experts"},
                              {"n_shared_experts", "shared_experts", "1"},
                              {"n_group", "expert_groups", "8"},
                              {"topk_group", "chosen_groups", "4"},
                              {"routed_scaling_factor", "routed_scale", "2.5"},
                              {"norm_topk_prob", "normalized_routing", "true"},
                              {"rope_interleave", "rope_interleaved", "true"},
                              {"topk_method", nullptr, "\"noaux_tc\""},
                              {"scoring_func", nullptr, "\"sigmoid\""}});
  f.names.correction = "mlp.gate.e_score_correction_bias";
  f.defaults.normalized_routing = true;
  f.sigmoid_scores = true;
  return f;
}

// The stacks of a block's experts, by name.
void add_stacks(const DecoderFamily& family, const DecoderOptions& o, const std::string& block,
                std::map<std::string, ExpertStack>& stacks) {
  const DecoderNames& n = family.names;
  const auto add = [&](const std::string& name, size_t which, const char* kind) {
    const auto projections = which == 0 ? std::vector{n.expert[0], n.expert[1]} : std::vector{n.expert[2]};
    ExpertStack& stack = stacks[block + name];
    stack = {{}, projections.size(), family.stacks_in_out, family.stacks_in_out && projections.size() > 1};
    if (kind == std::string_view(".weight")) stack.module = block + n.expert_modules[which];
    for (int64_t expert = 0; expert < o.experts; ++expert) {
      for (const std::string& one : projections) {
        stack.parts.push_back(concat(block, n.experts, expert, ".", one, kind));
      }
    }
  };
  for (const size_t which : {0, 1}) {
    add(n.stacks[which], which, ".weight");
    if (family.biased_experts) add(n.stacks[which] + "_bias", which, ".bias");
  }
}

}  // namespace

const std::vector<DecoderFamily>& decoder_families() {
  static const std::vector<DecoderFamily> all = {
      llama_family(),   mistral_family(),     qwen2_family(),      qwen3_family(),    phi3_family(),
      olmo2_family(),   gemma1_family(),      gemma2_family(),     gemma3_family(),   smollm3_family(),
      gpt2_family(),    gpt_neox_family(),    granite_family(),    stablelm_family(), starcoder2_family(),
      mixtral_family(), qwen2_moe_family(),   qwen3_moe_family(),  olmoe_family(),    granitemoe_family(),
      gpt_oss_family(), deepseek_v2_family(), deepseek_v3_family()};
  return all;
}

const DecoderFamily& decoder_family(const std::string& name) {
  const auto& all = decoder_families();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
  TWOBP_CHECK(found != all.end(), "there is no family of decoders \"", name, "\"");
  return *found;
}

TensorNames decoder_names(const DecoderFamily& family, const DecoderOptions& o) {
  TensorNames names;
  names.rename = family.rename;
  // Blocks behind the last predict further tokens, which transformers does not load either.
  if (family.latent) {
    names.rename = [from = family.names.blocks, layers = o.layers](const std::string& stored) {
      const bool further =
          stored.starts_with(from) && std::strtoll(stored.c_str() + from.size(), nullptr, 10) >= layers;
      return further ? std::string() : stored;
    };
  }
  if (o.tied) names.copies[family.names.head + ".weight"] = family.names.embedding + ".weight";
  if (o.experts > 0) {
    for (int64_t i = o.dense_layers; i < o.layers; ++i) {
      const std::string block = concat(family.names.blocks, i, ".");
      add_stacks(family, o, block, names.stacks);
      if (!family.names.correction.empty()) names.in_float32.insert(block + family.names.correction);
    }
    names.writes_stacks = family.saves_stacks;
  }
  if (!family.rotary) return names;
  // Early files have the frequencies of every layer. Those of a stretched embedding are the ones before the stretching:
  // at that time the positions were divided instead.
  const int64_t dims = rotary_dims(family, o);
  const RopeSettings rope = attention_shape(family, o, 0).rope;
  names.derived = [rope, dims](const std::string& name) -> std::vector<at::Tensor> {
    if (!name.ends_with(".rotary_emb.inv_freq")) return {};
    RopeSettings unstretched;
    unstretched.theta = rope.theta;
    return {rope_frequencies(rope, dims), rope_frequencies(unstretched, dims)};
  };
  return names;
}

}  // namespace twobp
