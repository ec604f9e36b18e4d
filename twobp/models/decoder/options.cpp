#include "twobp/models/decoder/options.h"

#include <algorithm>
#include <cmath>

#include "twobp/config/section.h"
#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/models.h"

namespace twobp {
namespace {

RopeSettings rope_settings(const DecoderOptions& o, bool local) {
  RopeSettings rope;
  rope.theta = local ? o.rope_local_theta : o.rope_theta;
  if (local) return rope;
  rope.scaling = parse_rope_scaling(o.rope_scaling);
  rope.factor = o.rope_factor;
  rope.low_freq_factor = o.rope_low_freq;
  rope.high_freq_factor = o.rope_high_freq;
  rope.original_positions = o.rope_original_positions;
  rope.beta_fast = o.rope_beta_fast;
  rope.beta_slow = o.rope_beta_slow;
  rope.whole_pairs = o.rope_whole_pairs;
  rope.attention_factor = o.rope_attention_factor;
  rope.short_factors = o.rope_short;
  rope.long_factors = o.rope_long;
  return rope;
}

// As yarn_apply_mscale in modeling_deepseek_v3.py.
double latent_scale(const DecoderOptions& o) {
  const double stretch = o.rope_factor > 1 ? 0.1 * o.rope_mscale * std::log(o.rope_factor) + 1 : 1;
  return stretch * stretch / std::sqrt(static_cast<double>(o.head_dim));
}

void check_rotary_dims(const DecoderFamily& family, const DecoderOptions& given) {
  if (!family.rotary) return;
  const DecoderOptions model = filled_in(family, given);
  const int64_t dims = rotary_dims(family, model);
  if (family.latent) {
    TWOBP_CHECK(dims % 2 == 0, "model.rope_dim (", dims,
                ") is odd: the rotary embedding turns pairs of features, so it needs an even number of them.");
    return;
  }
  if (model.rope_part == 1) {
    TWOBP_CHECK(dims % 2 == 0, given.head_dim > 0 ? "model.head_dim" : "model.dim / model.heads", " (", dims,
                ") is odd: the rotary embedding turns pairs of features, so a head needs an even number of them.");
    return;
  }
  TWOBP_CHECK(dims > 0 && dims % 2 == 0, "model.rope_part (", model.rope_part, ") turns ", dims, " of the ",
              model.head_dim, " features of a head: the rotary embedding turns pairs, so it needs an even number.");
}

// One factor for each pair that turns.
void check_factors(const char* key, const std::vector<double>& factors, bool longrope, int64_t pairs) {
  TWOBP_CHECK(longrope || factors.empty(), key,
              " is given, but only model.rope_scaling \"longrope\" uses it: "
              "remove it.");
  if (!longrope) return;
  TWOBP_CHECK(static_cast<int64_t>(factors.size()) == pairs, key, " has ", factors.size(), " factors, but ", pairs,
              " pairs of a head's features turn: give one for each.");
  for (const double factor : factors) TWOBP_CHECK(factor > 0, key, " has ", factor, ", not a number above 0.");
}

void check_rope(const DecoderFamily& family, const DecoderOptions& model) {
  const DecoderOptions usual;
  const std::string& scaling = model.rope_scaling;
  TWOBP_CHECK(scaling == "none" || family.scales(scaling), "model.rope_scaling is \"", scaling, "\", but a ",
              family.name, " has none or ", join(family.scalings), ".");
  const bool longrope = scaling == "longrope";
  const int64_t pairs = rotary_dims(family, filled_in(family, model)) / 2;
  check_factors("model.rope_short", model.rope_short, longrope, pairs);
  check_factors("model.rope_long", model.rope_long, longrope, pairs);
  const bool llama3 = scaling == "llama3";
  const bool yarn = scaling == "yarn";
  check_used(scaling != "none", "model.rope_factor", model.rope_factor, usual.rope_factor, "a model.rope_scaling");
  for (const auto& [key, value, unset] : {std::tuple{"model.rope_low_freq", model.rope_low_freq, usual.rope_low_freq},
                                          {"model.rope_high_freq", model.rope_high_freq, usual.rope_high_freq}}) {
    check_used(llama3, key, value, unset, "model.rope_scaling \"llama3\"");
  }
  check_used(scaling != "none" && scaling != "linear", "model.rope_original_positions", model.rope_original_positions,
             usual.rope_original_positions, "model.rope_scaling \"llama3\", \"yarn\", \"dynamic\" or \"longrope\"");
  check_used(yarn, "model.rope_mscale", model.rope_mscale, usual.rope_mscale, "model.rope_scaling \"yarn\"");
  check_used(yarn || longrope, "model.rope_attention_factor", model.rope_attention_factor, usual.rope_attention_factor,
             "model.rope_scaling \"yarn\" or \"longrope\"");
  for (const auto& [key, value, unset] :
       {std::tuple{"model.rope_beta_fast", model.rope_beta_fast, usual.rope_beta_fast},
        {"model.rope_beta_slow", model.rope_beta_slow, usual.rope_beta_slow}}) {
    check_used(yarn, key, value, unset, "model.rope_scaling \"yarn\"");
  }
  TWOBP_CHECK(yarn || model.rope_whole_pairs,
              "model.rope_whole_pairs is false, but only model.rope_scaling \"yarn\" uses it: remove it.");
  TWOBP_CHECK(!llama3 || model.rope_low_freq < model.rope_high_freq, "model.rope_low_freq (", model.rope_low_freq,
              ") is not below model.rope_high_freq (", model.rope_high_freq, "): frequencies between them are mixed.");
  TWOBP_CHECK(!yarn || model.rope_beta_slow <= model.rope_beta_fast, "model.rope_beta_slow (", model.rope_beta_slow,
              ") is above model.rope_beta_fast (", model.rope_beta_fast, "): frequencies between them are mixed.");
  for (const int turns : model.rope_layers) {
    TWOBP_CHECK(turns == 0 || turns == 1, "model.rope_layers has ", turns,
                ": give 1 for layers with rotary embedding and 0 for others.");
  }
}

void check_experts(const DecoderFamily& family, const DecoderOptions& model) {
  if (model.experts == 0) return;
  TWOBP_CHECK(model.experts_per_token <= model.experts, "model.experts_per_token (", model.experts_per_token,
              ") is more than model.experts (", model.experts, "): change one of them.");
  const DecoderOptions o = filled_in(family, model);
  TWOBP_CHECK(o.experts % o.expert_groups == 0, "model.expert_groups (", o.expert_groups,
              ") does not divide model.experts (", o.experts, "): change one of them.");
  const int64_t of_group = o.experts / o.expert_groups;
  TWOBP_CHECK(!family.sigmoid_scores || o.expert_groups == 1 || of_group >= 2, "model.expert_groups (", o.expert_groups,
              ") have one expert each, but a group is chosen by its two best: make fewer groups.");
  TWOBP_CHECK(o.chosen_groups <= o.expert_groups, "model.chosen_groups (", o.chosen_groups,
              ") is more than model.expert_groups (", o.expert_groups, "): change one of them.");
  TWOBP_CHECK(o.experts_per_token <= o.chosen_groups * of_group, "model.experts_per_token (", o.experts_per_token,
              ") is more than the ", o.chosen_groups * of_group, " experts of model.chosen_groups (", o.chosen_groups,
              ") groups: change one of them.");
  TWOBP_CHECK(o.balance_rate == 0 || o.dense_layers < o.layers, "model.balance_rate is ", o.balance_rate,
              ", but none of the ", o.layers, " blocks has experts: set it to 0, or lower model.dense_layers (",
              o.dense_layers, ").");
}

}  // namespace

std::vector<Key> decoder_keys() {
  using O = DecoderOptions;
  return {
      TWOBP_KEY(O, dim, "width of the model").in("features").from(1, kMaxWidth),
      TWOBP_KEY(O, layers, "depth of the model").in("blocks").from(1, kMaxCount),
      TWOBP_KEY(O, heads, "query heads of attention").in("heads").from(1, kMaxCount),
      TWOBP_KEY(O, kv_heads, "key and value heads; 0: as many as heads").in("heads").from(0, kMaxCount),
      TWOBP_KEY(O, head_dim, "width of a head; 0: dim / heads").in("features").from(0, kMaxCount),
      TWOBP_KEY(O, q_rank, "width of compressed queries; 0: they are not").in("features").from(0, kMaxWidth),
      TWOBP_KEY(O, kv_rank, "width of compressed keys and values").in("features").from(1, kMaxWidth),
      TWOBP_KEY(O, nope_dim, "features of a head without rotary embedding").in("features").from(1, kMaxCount),
      TWOBP_KEY(O, rope_dim, "features of a head with it").in("features").from(1, kMaxCount),
      TWOBP_KEY(O, value_dim, "width of a value").in("features").from(1, kMaxCount),
      TWOBP_KEY(O, rope_interleaved, "neighbouring features turn as a pair"),
      TWOBP_KEY(O, dense_layers, "first blocks, which have an MLP in place of experts").in("blocks").from(0, kMaxCount),
      TWOBP_KEY(O, dense_hidden, "width of that MLP; 0: as of hidden").in("features").from(0, 4 * kMaxWidth),
      TWOBP_KEY(O, experts, "experts in place of each MLP").in("experts").from(1, kMaxCount),
      TWOBP_KEY(O, experts_per_token, "experts that the router chooses for each token")
          .in("experts")
          .from(1, kMaxCount),
      TWOBP_KEY(O, expert_groups, "groups of experts").in("groups").from(1, kMaxCount),
      TWOBP_KEY(O, chosen_groups, "groups from which a token's experts come").in("groups").from(1, kMaxCount),
      TWOBP_KEY(O, routed_scale, "factor of the experts' weights").above(0),
      TWOBP_KEY(O, normalized_routing, "the weights of a token's experts sum to 1"),
      TWOBP_KEY(O, balance_loss, "factor of the loss that balances the tokens of the experts; 0: none").from(0, 1e6),
      TWOBP_KEY(O, balance_rate, "by which a step moves the biases of routers towards balance; 0: none")
          .from(0, 1)
          .freely_tuned(),
      TWOBP_KEY(O, shared_hidden, "width of the expert that all tokens share").in("features").from(1, 4 * kMaxWidth),
      TWOBP_KEY(O, shared_experts, "experts that all tokens share").in("experts").from(1, kMaxCount),
      TWOBP_KEY(
          O, hidden,
          "width of the MLP, or of an expert; 0: dim * 8 / 3 rounded up to a multiple of 64, or 4 * dim without a gate")
          .in("features")
          .from(0, 4 * kMaxWidth),
      vocab_key<O>(),
      TWOBP_KEY(O, norm_eps, "added to the mean square or the variance in a norm").above(0),
      TWOBP_KEY(O, activation, "activation of the MLP, or of its gate").one_of({"silu", "gelu", "gelu_tanh"}),
      TWOBP_KEY(O, attention_bias, "attention's projections have a bias"),
      TWOBP_KEY(O, mlp_bias, "the MLP's projections have a bias"),
      TWOBP_KEY(O, positions, "the longest sequence, each position with an embedding of its own")
          .in("tokens")
          .from(1, kMaxLength),
      TWOBP_KEY(O, rope_theta, "base of the rotary embedding's wavelengths").in("positions").above(0),
      TWOBP_KEY(O, rope_scaling, "how the wavelengths are stretched for longer sequences").one_of(rope_scaling_names()),
      TWOBP_KEY(O, rope_factor, "stretching factor; longrope: used for the attention factor only").above(0),
      TWOBP_KEY(O, rope_low_freq,
                "llama3: wavelengths above original positions / rope_low_freq are stretched by the factor")
          .above(0),
      TWOBP_KEY(O, rope_high_freq, "llama3: wavelengths below original positions / rope_high_freq are not stretched")
          .above(0),
      TWOBP_KEY(O, rope_original_positions, "all but linear: longest sequence before the stretching")
          .in("tokens")
          .above(0),
      TWOBP_KEY(O, rope_beta_fast,
                "yarn: pairs that turn more often than this in the original positions are not stretched")
          .in("turns")
          .above(0),
      TWOBP_KEY(O, rope_beta_slow, "yarn: pairs that turn less often than this are stretched by the whole factor")
          .in("turns")
          .above(0),
      TWOBP_KEY(O, rope_whole_pairs, "yarn: between these pairs, rounded to whole ones, the stretching grows"),
      TWOBP_KEY(O, rope_attention_factor,
                "yarn, longrope: factor of queries and keys; 0: 0.1 ln(factor) + 1, or for longrope sqrt(1 + "
                "ln(factor) / ln(original positions))")
          .at_least(0),
      TWOBP_KEY(O, rope_mscale, "yarn: m in (0.1 m ln(factor) + 1)^2, a factor of attention's scores").at_least(0),
      TWOBP_KEY(O, rope_short, "longrope: divisors of the wavenumbers, pair by pair, up to the original positions"),
      TWOBP_KEY(O, rope_long, "longrope: the divisors for sequences beyond the original positions"),
      TWOBP_KEY(O, rope_local_theta, "base of the wavelengths in layers with a window, which are not stretched")
          .in("positions")
          .above(0),
      TWOBP_KEY(O, rope_part, "fraction of a head's features that the rotary embedding turns").above_to(0, 1),
      TWOBP_KEY(O, rope_layers, "1 for a layer with rotary embedding, 0 for one without, repeated; []: all have it"),
      TWOBP_KEY(O, windows, "keys that a query of each layer sees, its own included, repeated; 0: all earlier ones")
          .in("tokens"),
      TWOBP_KEY(O, attention_scale, "factor of attention's scores; 0: 1 / sqrt(head_dim)").at_least(0),
      TWOBP_KEY(O, attention_cap, "attention's scores become cap * tanh(score / cap); 0: no cap").at_least(0),
      TWOBP_KEY(O, logit_cap, "logits become cap * tanh(logit / cap); 0: no cap").at_least(0),
      TWOBP_KEY(O, embedding_scale, "factor of the embedding").above(0),
      TWOBP_KEY(O, residual_scale, "factor of the output that each half of a block adds to its input").above(0),
      TWOBP_KEY(O, logit_scale, "factor of the logits").above(0),
      TWOBP_KEY(O, parallel, "attention and MLP of a block read the same input"),
      dropout_key(TWOBP_KEY(
          O, dropout, "dropout probability after each half of a block, in some families also after the embedding")),
      dropout_key(TWOBP_KEY(O, attention_dropout, "dropout probability of attention's probabilities")),
      TWOBP_KEY(O, tied, "input and output embeddings share one matrix"),
      pad_token_key<O>(),
      init_std_key<O>(),
  };
}

DecoderOptions filled_in(const DecoderFamily& family, DecoderOptions o) {
  constexpr int64_t kMultiple = 64;
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  if (family.latent) o.head_dim = o.nope_dim + o.rope_dim;
  if (o.head_dim == 0) o.head_dim = o.dim / std::max<int64_t>(1, o.heads);
  for (int64_t* hidden : {&o.hidden, &o.dense_hidden}) {
    if (*hidden == 0) *hidden = family.gated ? (o.dim * 8 / 3 + kMultiple - 1) / kMultiple * kMultiple : 4 * o.dim;
  }
  o.expert_groups = std::max<int64_t>(1, o.expert_groups);
  o.chosen_groups = std::max<int64_t>(1, o.chosen_groups);
  if (o.shared_experts > 0) o.shared_hidden = o.shared_experts * o.hidden;
  return o;
}

int64_t rotary_dims(const DecoderFamily& family, const DecoderOptions& o) {
  if (family.latent) return o.rope_dim;
  return family.rotary ? static_cast<int64_t>(static_cast<double>(o.head_dim) * o.rope_part) : 0;
}

int cyclic(const std::vector<int>& list, int64_t layer, int otherwise) {
  return list.empty() ? otherwise : list[static_cast<size_t>(layer) % list.size()];
}

AttentionShape attention_shape(const DecoderFamily& family, const DecoderOptions& o, int64_t layer) {
  AttentionShape shape{o.heads, o.kv_heads, o.head_dim};
  shape.window = cyclic(o.windows, layer, 0);
  shape.rope = rope_settings(o, family.local_rope && shape.window > 0);
  shape.rotary = cyclic(o.rope_layers, layer, 1) == 1 ? rotary_dims(family, o) : 0;
  shape.scale = o.attention_scale;
  shape.cap = o.attention_cap;
  shape.interleaved = family.interleaved;
  if (!family.latent) return shape;
  shape.scale = latent_scale(o);
  shape.value_dim = o.value_dim;
  shape.rotary_last = true;
  return shape;
}

void check_decoder(const DecoderFamily& family, const DecoderOptions& model) {
  check_rope(family, model);
  TWOBP_CHECK(family.latent || model.head_dim > 0 || model.dim % model.heads == 0, "model.dim (", model.dim,
              ") is not divisible by model.heads (", model.heads, "): change one of them",
              has_option(family, "head_dim") ? ", or set model.head_dim." : ".");
  TWOBP_CHECK(model.kv_heads == 0 || model.heads % model.kv_heads == 0, "model.kv_heads (", model.kv_heads,
              ") does not divide model.heads (", model.heads, "): every key-value head serves as many query heads.");
  check_rotary_dims(family, model);
  check_experts(family, model);
  TWOBP_CHECK(
      !family.latent || model.q_rank > 0 || !model.attention_bias,
      "model.attention_bias is true, but model.q_rank is 0: queries that are not compressed have no bias, which "
      "is not supported beside keys that have one.");
  for (const int window : model.windows) {
    TWOBP_CHECK(window >= 0, "model.windows has ", window,
                ": give the number of keys that a query sees, or 0 for all before it.");
  }
  TWOBP_CHECK(family.gated || model.activation != "silu", "model.activation is \"silu\", but the MLP of model.type \"",
              family.name, "\" has no gate: set it to \"gelu\" or \"gelu_tanh\".");
  check_pad_token(model.pad_token, model.vocab);
}

}  // namespace twobp
