#include "twobp/models/llama.h"

#include "twobp/core/check.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/cross_entropy.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/residual.h"
#include "twobp/nn/layers/rms_norm.h"
#include "twobp/nn/layers/sequential.h"
#include "twobp/nn/layers/squared_error.h"
#include "twobp/nn/layers/swiglu.h"

namespace twobp {
namespace {

std::unique_ptr<Layer> attention_half(const std::string& block, const LlamaOptions& o) {
  const std::string attention = block + ".self_attn.";
  const int64_t q_rows = o.heads * o.head_dim;
  const int64_t kv_rows = o.kv_heads * o.head_dim;
  std::vector<ParameterPart> qkv = {{attention + "q_proj.weight", q_rows},
                                    {attention + "k_proj.weight", kv_rows},
                                    {attention + "v_proj.weight", kv_rows}};
  const AttentionShape shape{o.heads, o.kv_heads, o.head_dim, o.rope};
  return std::make_unique<Residual>(make_sequential(
      std::make_unique<RmsNorm>(block + ".input_layernorm.weight", o.dim, o.norm_eps, o.dtype),
      make_linear(qkv, o.dim, o.init_std, o.dtype, o.lora), std::make_unique<Attention>(shape, o.dtype),
      make_linear({{attention + "o_proj.weight", o.dim}}, q_rows, o.init_std, o.dtype, o.lora)));
}

// Shared by both models: everything it needs is in MlpOptions.
std::unique_ptr<Layer> mlp_half(const std::string& block, const MlpOptions& o) {
  const std::string projections = block + ".mlp.";
  std::vector<ParameterPart> gate_up = {{projections + "gate_proj.weight", o.hidden},
                                        {projections + "up_proj.weight", o.hidden}};
  return std::make_unique<Residual>(make_sequential(
      std::make_unique<RmsNorm>(block + ".post_attention_layernorm.weight", o.dim, o.norm_eps, o.dtype),
      make_linear(gate_up, o.dim, o.init_std, o.dtype, o.lora), std::make_unique<SwiGlu>(),
      make_linear({{projections + "down_proj.weight", o.dim}}, o.hidden, o.init_std, o.dtype, o.lora)));
}

std::string block_name(int64_t i) {
  return "model.layers." + std::to_string(i);
}

}  // namespace

ModelSpec llama(const LlamaOptions& o) {
  TWOBP_CHECK(o.layers >= 1 && o.dim >= 1 && o.vocab >= 1 && o.hidden >= 1,
              "a LLaMa needs at least one layer, dim, vocab and hidden of at least 1");
  const std::string embedding = "model.embed_tokens.weight";
  const MlpOptions mlp_options{o.dim, o.layers, o.hidden, o.norm_eps, o.init_std, o.dtype, o.lora};
  ModelSpec model;
  model.layers.push_back({"model.embed_tokens", "embedding", [o, embedding] {
                            return std::make_unique<Embedding>(embedding, o.vocab, o.dim, o.init_std,
                                                               o.dtype);
                          }});
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string block = block_name(i);
    model.layers.push_back(
        {block + ".attention", "attention", [o, block] { return attention_half(block, o); }});
    model.layers.push_back(
        {block + ".mlp", "mlp", [mlp_options, block] { return mlp_half(block, mlp_options); }});
  }
  const std::string head = o.tied ? embedding : "lm_head.weight";
  model.layers.push_back({"lm_head", "head", [o, head] {
                            return make_sequential(
                                std::make_unique<RmsNorm>("model.norm.weight", o.dim, o.norm_eps, o.dtype),
                                make_linear({{head, o.vocab}}, o.dim, o.init_std, o.dtype, o.lora),
                                std::make_unique<CrossEntropy>());
                          }});
  return model;
}

ModelSpec mlp(const MlpOptions& o) {
  TWOBP_CHECK(o.layers >= 1 && o.dim >= 1 && o.hidden >= 1, "a stack of MLPs needs sizes of at least 1");
  ModelSpec model;
  model.input_field = "input";
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string block = block_name(i);
    const bool last = i + 1 == o.layers;
    model.layers.push_back(
        {block + ".mlp", last ? "mlp with loss" : "mlp", [o, block, last]() -> std::unique_ptr<Layer> {
           if (!last) return mlp_half(block, o);
           return make_sequential(mlp_half(block, o), std::make_unique<SquaredError>());
         }});
  }
  return model;
}

}  // namespace twobp
