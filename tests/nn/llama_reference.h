// The whole LLaMa on autograd in float64. The library's models and training are compared with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "tests/nn/reference.h"
#include "twobp/models/decoder/options.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/parameter.h"

namespace twobp::test {

// Views of values or gradients under Hugging Face's names. Packed weights are split into their parts, and a tied weight
// is there once for each use.
inline std::multimap<std::string, at::Tensor> parts_of(const std::vector<Parameter*>& weights,
                                                       at::Tensor Parameter::*which = &Parameter::value) {
  std::multimap<std::string, at::Tensor> parts;
  for (const Parameter* weight : weights) {
    int64_t row = 0;
    for (const ParameterPart& part : weight->parts()) {
      parts.emplace(part.name, (weight->*which).narrow(0, row, part.rows));
      row += part.rows;
    }
  }
  return parts;
}

class LlamaReference {
 public:
  // Copies the weights, of a tied one the first use.
  LlamaReference(const DecoderOptions& options, const std::vector<Parameter*>& weights) : o_(options) {
    for (const auto& [name, value] : parts_of(weights))
      weights_.emplace(name, value.to(at::kDouble).clone().detach().requires_grad_(true));
  }

  // Returns the mean over all counted labels of the micro-batches.
  double backward(const std::vector<Fields>& micro_batches) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    int64_t targets = 0;
    for (const Fields& fields : micro_batches) {
      sum = sum + reference::cross_entropy(logits(fields.at("input_ids")), fields.at("labels"), 1);
      targets += fields.at("labels").ne(-100).sum().item<int64_t>();
    }
    for (auto& [name, w] : weights_) w.mutable_grad() = at::Tensor();
    const at::Tensor mean = sum / targets;
    mean.backward();
    return mean.item<double>();
  }

  const std::map<std::string, at::Tensor>& weights() const { return weights_; }
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
    return reference::rms_norm(x, weight(gain), o_.norm_eps);
  }
  at::Tensor project(const at::Tensor& x, const std::vector<std::string>& names) const {
    std::vector<at::Tensor> parts;
    for (const std::string& name : names) parts.push_back(reference::linear(x, weight(name + "_proj.weight")));
    return at::cat(parts, -1);
  }

  at::Tensor logits(const at::Tensor& ids) const {
    AttentionShape shape{o_.heads,
                         o_.kv_heads > 0 ? o_.kv_heads : o_.heads,
                         o_.head_dim > 0 ? o_.head_dim : o_.dim / o_.heads,
                         {o_.rope_theta}};
    at::Tensor x = at::embedding(weight("model.embed_tokens.weight"), ids);
    for (int64_t i = 0; i < o_.layers; ++i) {
      const std::string block = "model.layers." + std::to_string(i), attn = block + ".self_attn.",
                        mlp = block + ".mlp.";
      const at::Tensor a = norm(x, block + ".input_layernorm.weight");
      x = x + project(reference::attention(project(a, {attn + "q", attn + "k", attn + "v"}), shape), {attn + "o"});
      const at::Tensor b = norm(x, block + ".post_attention_layernorm.weight");
      x = x + project(reference::swiglu(project(b, {mlp + "gate", mlp + "up"})), {mlp + "down"});
    }
    return reference::linear(norm(x, "model.norm.weight"),
                             weight(o_.tied ? "model.embed_tokens.weight" : "lm_head.weight"));
  }

  DecoderOptions o_;
  std::map<std::string, at::Tensor> weights_;
};

}  // namespace twobp::test
