// This is a second implementation of the same LLaMa, on autograd in float64 and with explicit attention. The library's
// training is compared with it.
#pragma once

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/data/data.h"
#include "twobp/models/decoder/options.h"
#include "twobp/nn/parameter.h"
#include "twobp/train/config.h"

namespace twobp::test {

class Reference {
 public:
  // Copies the weights under Hugging Face's names. Packed weights are copied as their parts.
  Reference(const ModelConfig& config, const std::vector<Parameter*>& weights)
      : config_(config.type.as<DecoderOptions>()) {
    for (const Parameter* weight : weights) {
      int64_t row = 0;
      for (const ParameterPart& part : weight->parts()) {
        names_.push_back(part.name);
        weights_[part.name] =
            weight->value.narrow(0, row, part.rows).to(at::kDouble).clone().detach().requires_grad_(true);
        row += part.rows;
      }
    }
  }

  // Returns the sum over counted labels of -log p(label), with a graph.
  at::Tensor loss_sum(const at::Tensor& ids, const at::Tensor& labels) const {
    at::Tensor x = at::embedding(weight("model.embed_tokens.weight"), ids);  // (B, S, C)
    for (int64_t i = 0; i < config_.layers; ++i) {
      const std::string block = "model.layers." + std::to_string(i);
      x = x + attention(block + ".self_attn.", norm(x, block + ".input_layernorm.weight"));
      x = x + mlp(block + ".mlp.", norm(x, block + ".post_attention_layernorm.weight"));
    }
    x = norm(x, "model.norm.weight");
    const at::Tensor logits = at::matmul(x, weight(config_.tied ? "model.embed_tokens.weight" : "lm_head.weight").t());
    return at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten(), {}, at::Reduction::Sum, -100);
  }

  // Returns the mean over all counted labels of the batch, with all samples at once on one device.
  double backward(const Batch& batch) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (const Fields& fields : batch.micro_batches) sum = sum + loss_sum(fields.at("input_ids"), fields.at("labels"));
    int64_t targets = 0;
    for (const Fields& fields : batch.micro_batches) targets += fields.at("labels").ne(-100).sum().item<int64_t>();
    for (auto& [name, w] : weights_) w.mutable_grad() = at::Tensor();
    const at::Tensor mean = sum / targets;
    mean.backward();
    return mean.item<double>();
  }

  const std::vector<std::string>& names() const { return names_; }
  at::Tensor& weight(const std::string& name) { return weights_.at(name); }
  const at::Tensor& weight(const std::string& name) const { return weights_.at(name); }
  at::Tensor grad(const std::string& name) const { return weights_.at(name).grad(); }

  // Does torch.nn.utils.clip_grad_norm_. Returns the norm before clipping.
  double clip(double max_norm) {
    double squares = 0;
    for (auto& [name, w] : weights_) squares += w.grad().square().sum().item<double>();
    const double norm = std::sqrt(squares);
    const double factor = std::min(1.0, max_norm / (norm + 1e-6));
    if (max_norm > 0) {
      for (auto& [name, w] : weights_) w.mutable_grad().mul_(factor);
    }
    return norm;
  }

 private:
  at::Tensor norm(const at::Tensor& x, const std::string& gain) const {
    return x * at::rsqrt(x.square().mean(-1, true) + config_.norm_eps) * weight(gain);
  }

  // For x (B, H, S, D), returns x cos + rotate_half(x) sin, as in transformers' modeling_llama.
  at::Tensor rope(const at::Tensor& x) const {
    const int64_t half = x.size(3) / 2;
    const auto options = at::TensorOptions().dtype(at::kDouble);
    const at::Tensor frequency =
        at::pow(at::scalar_tensor(config_.rope_theta, options), -at::arange(half, options) / static_cast<double>(half));
    const at::Tensor angle = at::outer(at::arange(x.size(2), options), frequency).repeat({1, 2});  // (S, D)
    const at::Tensor rotated = at::cat({-x.narrow(3, half, half), x.narrow(3, 0, half)}, 3);
    return x * angle.cos() + rotated * angle.sin();
  }

  at::Tensor attention(const std::string& name, const at::Tensor& x) const {
    const int64_t batch = x.size(0);
    const int64_t positions = x.size(1);
    const int64_t head_dim = config_.dim / config_.heads;
    const int64_t kv_heads = config_.kv_heads > 0 ? config_.kv_heads : config_.heads;
    const auto project = [&](const char* which, int64_t heads) {
      return at::matmul(x, weight(name + which).t()).view({batch, positions, heads, head_dim}).transpose(1, 2);
    };
    const at::Tensor q = rope(project("q_proj.weight", config_.heads));
    const at::Tensor k = rope(project("k_proj.weight", kv_heads)).repeat_interleave(config_.heads / kv_heads, 1);
    const at::Tensor v = project("v_proj.weight", kv_heads).repeat_interleave(config_.heads / kv_heads, 1);
    const at::Tensor future = at::ones({positions, positions}, at::kBool).triu(1);
    const at::Tensor scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(head_dim));
    const at::Tensor p = at::softmax(scores.masked_fill(future, -std::numeric_limits<double>::infinity()), -1);
    const at::Tensor out = at::matmul(p, v).transpose(1, 2).reshape({batch, positions, config_.heads * head_dim});
    return at::matmul(out, weight(name + "o_proj.weight").t());
  }

  at::Tensor mlp(const std::string& name, const at::Tensor& x) const {
    const at::Tensor gate = at::matmul(x, weight(name + "gate_proj.weight").t());
    const at::Tensor up = at::matmul(x, weight(name + "up_proj.weight").t());
    return at::matmul(at::silu(gate) * up, weight(name + "down_proj.weight").t());
  }

  DecoderOptions config_;
  std::vector<std::string> names_;  // in model order
  std::map<std::string, at::Tensor> weights_;
};

// Returns views of the library's weights under the reference's names.
inline std::map<std::string, at::Tensor> parts_of(const std::vector<Parameter*>& weights) {
  std::map<std::string, at::Tensor> parts;
  for (const Parameter* weight : weights) {
    int64_t row = 0;
    for (const ParameterPart& part : weight->parts()) {
      parts[part.name] = weight->value.narrow(0, row, part.rows);
      row += part.rows;
    }
  }
  return parts;
}

}  // namespace twobp::test
