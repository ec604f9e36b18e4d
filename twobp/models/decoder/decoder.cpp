#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/models/decoder/config_file.h"
#include "twobp/models/decoder/family.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/balance.h"
#include "twobp/nn/layers/dropout.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/experts.h"
#include "twobp/nn/layers/latent_projections.h"
#include "twobp/nn/layers/losses.h"
#include "twobp/nn/layers/norms.h"
#include "twobp/nn/layers/residual.h"

namespace twobp {
namespace {

using Layers = std::vector<std::unique_ptr<Layer>>;

// The layers of one model.
struct Decoder {
  DecoderFamily family;
  DecoderOptions o;  // filled in
  BuildSettings s;

  GainForm gain() const {
    return family.norm == DecoderFamily::Norm::kRmsOnePlus ? GainForm::kOnePlusWeight : GainForm::kWeight;
  }

  // Appends the norm of that name; none if it is empty.
  void add_norm(Layers& layers, const std::string& block, const std::string& name) const {
    if (name.empty()) return;
    if (family.norm == DecoderFamily::Norm::kLayerNorm) {
      layers.push_back(std::make_unique<LayerNorm>(block + name, o.dim, o.norm_eps, s.dtype));
    } else {
      layers.push_back(std::make_unique<RmsNorm>(block + name + ".weight", o.dim, o.norm_eps, s.dtype, gain()));
    }
  }

  // The projections to `rows`, or one weight that has all their rows, in `groups`.
  static std::vector<ParameterPart> parts(const std::string& block, const std::vector<std::string>& names,
                                          const std::vector<int64_t>& rows, int64_t groups = 1) {
    std::vector<ParameterPart> parts;
    if (names.size() == 1) {
      int64_t sum = 0;
      for (const int64_t count : rows) sum += count;
      return {{block + names[0] + ".weight", sum, {rows, groups}}};
    }
    for (size_t i = 0; i < rows.size(); ++i) parts.push_back({block + names[i] + ".weight", rows[i]});
    return parts;
  }

  std::unique_ptr<Layer> linear(const std::vector<ParameterPart>& parts, int64_t in, bool bias) const {
    return make_linear(parts, in, o.init_std, s.dtype, s.lora, bias, family.transposed);
  }

  // Half of a block: norm, the layers of `half`, norm, dropout.
  template <typename Half>
  std::unique_ptr<Layer> branch(const std::string& block, const std::string& before, Half&& half,
                                const std::string& after, const std::string& name) const {
    Layers layers;
    add_norm(layers, block, before);
    half(layers);
    add_norm(layers, block, after);
    if (o.dropout > 0) layers.push_back(std::make_unique<Dropout>(o.dropout, block + name));
    return std::make_unique<Sequential>(std::move(layers));
  }

  // Queries, keys and values, ready for the rotary embedding.
  void add_projections(Layers& layers, const std::string& block) const {
    const DecoderNames& n = family.names;
    const int64_t q_rows = o.heads * o.head_dim;
    const int64_t kv_rows = o.kv_heads * o.head_dim;
    const int64_t groups = family.interleaved ? o.heads : 1;
    layers.push_back(linear(parts(block, n.qkv, {q_rows, kv_rows, kv_rows}, groups), o.dim, o.attention_bias));
    if (n.query_norm.empty()) return;
    const QueryKeyNormShape norm{o.heads, o.kv_heads, o.head_dim, family.whole_head_norm};
    layers.push_back(std::make_unique<QueryKeyNorm>(block + n.query_norm + ".weight", block + n.key_norm + ".weight",
                                                    norm, o.norm_eps, s.dtype, gain()));
  }

  // The same of latent attention. Its norms have an eps of their own.
  void add_latent_projections(Layers& layers, const std::string& block) const {
    constexpr double kEps = 1e-6;
    const DecoderNames& n = family.names;
    const LatentShape shape{o.heads, o.nope_dim, o.rope_dim, o.value_dim, o.q_rank, o.kv_rank, o.rope_interleaved};
    const auto up = [&](const std::string& norm, const std::string& projection, int64_t rank, int64_t rows) {
      return make_sequential(std::make_unique<RmsNorm>(block + norm + ".weight", rank, kEps, s.dtype),
                             linear(parts(block, {projection}, {rows}), rank, false));
    };
    const int64_t q_rows = o.heads * o.head_dim;
    const std::string& q = n.qkv[o.q_rank > 0 ? 0 : 2];
    const std::vector<int64_t> rows = {shape.query_width(), o.kv_rank + o.rope_dim};
    layers.push_back(linear(parts(block, {q, n.qkv[3]}, rows), o.dim, o.attention_bias));
    std::unique_ptr<Layer> query;
    if (o.q_rank > 0) query = up(n.query_norm, n.qkv[1], o.q_rank, q_rows);
    layers.push_back(std::make_unique<LatentProjections>(
        shape, std::move(query), up(n.key_norm, n.qkv[4], o.kv_rank, o.heads * (o.nope_dim + o.value_dim))));
  }

  std::unique_ptr<Layer> attention(const std::string& block, int64_t layer) const {
    const DecoderNames& n = family.names;
    const AttentionShape shape = attention_shape(family, o, layer);
    auto half = [&](Layers& layers) {
      family.latent ? add_latent_projections(layers, block) : add_projections(layers, block);
      layers.push_back(std::make_unique<Attention>(shape, s.dtype, o.attention_dropout,
                                                   block + "attention.probabilities",
                                                   n.sinks.empty() ? "" : block + n.sinks, o.init_std));
      layers.push_back(linear(parts(block, {n.attention_output}, {o.dim}), shape.causal().out_width(),
                              o.attention_bias && family.output_bias));
    };
    auto whole = branch(block, n.attention_norm, half, n.attention_after_norm, "attention.dropout");
    if (o.parallel) return std::make_unique<ResidualBegin>(std::move(whole));
    return beside_balance(std::make_unique<Residual>(std::move(whole), o.residual_scale));
  }

  // act(up) and the projection from it.
  void add_plain_output(Layers& layers, const std::vector<ParameterPart>& output) const {
    const GeluForm form = o.activation == "gelu" ? GeluForm::kErf : GeluForm::kTanh;
    if (LoraLinear::adapts(output, s.lora)) {
      layers.push_back(std::make_unique<Gelu>(form));
      layers.push_back(linear(output, o.hidden, o.mlp_bias));
    } else {
      layers.push_back(
          std::make_unique<GeluLinear>(form, output, o.hidden, o.init_std, s.dtype, o.mlp_bias, family.transposed));
    }
  }

  void add_gated(Layers& layers, const std::vector<ParameterPart>& input, const std::vector<ParameterPart>& output,
                 int64_t hidden) const {
    layers.push_back(linear(input, o.dim, o.mlp_bias));
    layers.push_back(std::make_unique<GatedUnit>(parse_gate(o.activation)));
    layers.push_back(linear(output, hidden, o.mlp_bias));
  }

  std::unique_ptr<Layer> experts(const std::string& block) const {
    const DecoderNames& n = family.names;
    ExpertsNames names{block + n.router, block + n.experts, n.expert[0], n.expert[1], n.expert[2]};
    if (!n.correction.empty()) names.correction = block + n.correction;
    names.input_module = block + n.expert_modules[0];
    names.output_module = block + n.expert_modules[1];
    for (const std::string& projection : n.expert) {
      const std::string name = concat(names.experts, "0.", projection);
      TWOBP_CHECK(!LoraLinear::adapts({{name + ".weight", 1}}, s.lora), "LoRA cannot adapt ", name,
                  " alone: name the tensors of all experts in the targets, ", n.expert_modules[0], " and ",
                  n.expert_modules[1]);
    }
    std::unique_ptr<Layer> shared;
    if (o.shared_hidden > 0) {
      const std::string expert = block + n.shared_expert;
      Layers mlp;
      add_gated(mlp, parts(expert, {n.expert[0], n.expert[1]}, {o.shared_hidden, o.shared_hidden}),
                parts(expert, {n.expert[2]}, {o.dim}), o.shared_hidden);
      shared = std::make_unique<Sequential>(std::move(mlp));
      if (!n.shared_gate.empty()) {
        shared =
            std::make_unique<Switched>(linear(parts(block, {n.shared_gate}, {1}), o.dim, false), std::move(shared));
      }
    }
    const ExpertsShape shape{.dim = o.dim,
                             .hidden = o.hidden,
                             .experts = o.experts,
                             .chosen = o.experts_per_token,
                             .normalized = o.normalized_routing,
                             .gate = parse_gate(o.activation),
                             .biased = family.biased_experts,
                             .gate_limit = family.gate_limit,
                             .balanced = o.balance_loss > 0,
                             .share = s.experts,
                             .sigmoid = family.sigmoid_scores,
                             .groups = o.expert_groups,
                             .chosen_groups = o.chosen_groups,
                             .scale = o.routed_scale,
                             .balance_rate = o.balance_rate};
    return std::make_unique<Experts>(names, shape, o.init_std, s.dtype, std::move(shared), s.lora);
  }

  bool has_experts(int64_t layer) const { return o.experts > 0 && layer >= o.dense_layers; }

  std::unique_ptr<Layer> mlp(const std::string& block, int64_t layer) const {
    const DecoderNames& n = family.names;
    auto half = [&](Layers& layers) {
      if (has_experts(layer)) {
        layers.push_back(experts(block));
        return;
      }
      const std::vector<ParameterPart> output = parts(block, {n.mlp_output}, {o.dim});
      const int64_t hidden = o.experts > 0 ? o.dense_hidden : o.hidden;
      if (family.gated) return add_gated(layers, parts(block, n.mlp_input, {hidden, hidden}), output, hidden);
      layers.push_back(linear(parts(block, n.mlp_input, {o.hidden}), o.dim, o.mlp_bias));
      add_plain_output(layers, output);
    };
    auto whole = branch(block, n.mlp_norm, half, n.mlp_after_norm, "mlp.dropout");
    if (o.parallel) return std::make_unique<ResidualJoin>(std::move(whole));
    return beside_balance(std::make_unique<Residual>(std::move(whole), o.residual_scale));
  }

  std::unique_ptr<Layer> embedding() const {
    const DecoderNames& n = family.names;
    const double root = family.scaled_embedding ? std::sqrt(static_cast<double>(o.dim)) : 1;
    auto tokens = std::make_unique<Embedding>(n.embedding + ".weight", o.vocab, o.dim, o.init_std, s.dtype, o.pad_token,
                                              root * o.embedding_scale);
    const bool drops = family.embedding_dropout && o.dropout > 0;
    if (n.positions.empty() && !drops && o.balance_loss == 0) return tokens;
    Layers layers;
    layers.push_back(std::move(tokens));
    if (!n.positions.empty()) {
      layers.push_back(
          std::make_unique<LearnedPositions>(n.positions + ".weight", o.positions, o.dim, o.init_std, s.dtype));
    }
    if (drops) layers.push_back(std::make_unique<Dropout>(o.dropout, n.embedding + ".dropout"));
    if (o.balance_loss > 0) layers.push_back(std::make_unique<BalanceBegin>(o.experts));
    return std::make_unique<Sequential>(std::move(layers));
  }

  std::unique_ptr<Layer> head() const {
    const DecoderNames& n = family.names;
    Layers layers;
    add_norm(layers, "", n.norm);
    layers.push_back(
        make_linear({{(o.tied ? n.embedding : n.head) + ".weight", o.vocab}}, o.dim, o.init_std, s.dtype, s.lora));
    layers.push_back(std::make_unique<CrossEntropy>(LogitsForm{o.logit_scale, o.logit_cap}));
    auto whole = std::make_unique<Sequential>(std::move(layers));
    if (o.balance_loss == 0) return whole;
    return std::make_unique<BalanceLoss>(std::move(whole), o.balance_loss, o.experts_per_token);
  }

  // One half of a block, in a model whose sums of balance pass it.
  std::unique_ptr<Layer> beside_balance(std::unique_ptr<Layer> half) const {
    if (o.balance_loss == 0) return half;
    return std::make_unique<BalanceBeside>(std::move(half));
  }

  // Layers of one kind cost the same.
  std::string attention_kind(int64_t layer) const {
    const AttentionShape shape = attention_shape(family, o, layer);
    std::string kind = "attention";
    if (shape.window > 0) kind += concat(" in ", shape.window);
    if (family.rotary && shape.rotary == 0) kind += " unrotated";
    return kind;
  }
};

ModelType type_of_family(const DecoderFamily& family) {
  std::vector<Key> keys;
  for (Key& key : decoder_keys()) {
    if (has_option(family, key.name)) keys.push_back(std::move(key));
  }
  ModelType type = make_model_type<DecoderOptions>(std::move(keys));
  type.name = family.name;
  type.options.name = family.name;
  type.options.group = "decoders";
  type.options.defaults = std::make_shared<DecoderOptions>(family.defaults);
  type.defaults = family.defaults;
  type.hf_type = family.name;
  type.hf_class = family.hf_class;
  type.names = [&family](const ModelOptions& o) {
    return decoder_names(family, filled_in(family, o.as<DecoderOptions>()));
  };
  type.lora = true;
  type.peft_task = "CAUSAL_LM";
  if (family.latent)
    type.peft_excludes = {"gate_proj", "up_proj", "down_proj"};  // PEFT takes them for those of experts
  type.transposed = family.transposed;
  type.reduced_precision = true;
  type.input = [&family](const ModelOptions& o) {
    ModelInput input;
    input.vocab = o.as<DecoderOptions>().vocab;
    input.documents = true;
    if (!family.names.positions.empty()) input.longest = o.as<DecoderOptions>().positions;
    return input;
  };
  type.no_slices = [](const ModelOptions&) { return std::string(); };
  type.no_graph = [](const ModelOptions& o) {
    const auto& options = o.as<DecoderOptions>();
    const bool drops = options.dropout > 0 || options.attention_dropout > 0;
    if (drops) return std::string("its dropout draws other masks in every step");
    return std::string(options.experts > 0 ? "the host counts the tokens of each expert" : "");
  };
  type.fill_in = [&family](ModelOptions& o) {
    auto& options = o.as<DecoderOptions>();
    options = filled_in(family, options);
  };
  type.check = [&family](const ModelOptions& o) { check_decoder(family, o.as<DecoderOptions>()); };
  type.build = [&family](const ModelOptions& o, const BuildSettings& s) {
    return decoder(family, o.as<DecoderOptions>(), s);
  };
  type.read_hf = [&family](const CheckedJson& file, ModelOptions& o) {
    read_decoder(family, file, o.as<DecoderOptions>());
  };
  type.write_hf = [&family](const ModelOptions& o, int64_t sequence, nlohmann::json& out) {
    write_decoder(family, o.as<DecoderOptions>(), sequence, out);
  };
  return type;
}

}  // namespace

std::unique_ptr<Layer> decoder_mlp(const DecoderFamily& family, const DecoderOptions& options,
                                   const BuildSettings& settings, const std::string& block) {
  return Decoder{family, options, settings}.mlp(block + ".", /*layer=*/0);
}

ModelSpec decoder(const DecoderFamily& family, const DecoderOptions& given, const BuildSettings& s) {
  TWOBP_CHECK(given.heads >= 1, "a ", family.name, " needs at least one head");
  const Decoder d{family, filled_in(family, given), s};
  const DecoderOptions& o = d.o;
  TWOBP_CHECK(o.layers >= 1 && o.dim >= 1 && o.vocab >= 1 && o.hidden >= 1, "a ", family.name,
              " needs at least one layer, dim, vocab and hidden of at least 1");
  ModelSpec model;
  model.layers.push_back({family.names.embedding, "embedding", [d] { return d.embedding(); }});
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string block = family.names.blocks + std::to_string(i);
    model.layers.push_back(
        {block + ".attention", d.attention_kind(i), [d, block, i] { return d.attention(block + ".", i); }});
    model.layers.push_back(
        {block + ".mlp", d.has_experts(i) ? "experts" : "mlp", [d, block, i] { return d.mlp(block + ".", i); }});
  }
  model.layers.push_back({family.names.head, "head", [d] { return d.head(); }});
  return model;
}

ModelSpec llama(const DecoderOptions& options, const BuildSettings& settings) {
  return decoder(decoder_family("llama"), options, settings);
}

std::vector<ModelType> decoder_types() {
  std::vector<ModelType> types;
  for (const DecoderFamily& family : decoder_families()) types.push_back(type_of_family(family));
  return types;
}

}  // namespace twobp
