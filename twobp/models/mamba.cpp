#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/models/models.h"
#include "twobp/nn/kernels/scan/scan_kernels.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/embedding.h"
#include "twobp/nn/layers/losses.h"
#include "twobp/nn/layers/mamba_mixer.h"
#include "twobp/nn/layers/norms.h"
#include "twobp/nn/layers/residual.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr const char* kMambaEmbedding = "backbone.embeddings.weight";
constexpr const char* kMambaHead = "lm_head.weight";

int64_t dt_rank_of(const MambaOptions& o) {
  return o.dt_rank > 0 ? o.dt_rank : (o.dim + 15) / 16;
}

void read_mamba(const CheckedJson& file, MambaOptions& model) {
  const std::string activation = file.text("hidden_act", "silu");
  TWOBP_CHECK(activation == "silu", file.origin, ": hidden_act ", shown(activation), " is not supported: \"silu\" is");
  file.require_false("use_bias");
  TWOBP_CHECK(file.boolean("use_conv_bias", true), file.origin,
              ": use_conv_bias false is not supported: the convolution has a bias");
  model.dim = file.integer("hidden_size");
  model.layers = file.integer("num_hidden_layers");
  model.vocab = file.integer("vocab_size");
  model.state = file.integer("state_size", 16);
  model.conv_kernel = file.integer("conv_kernel", 4);
  model.expand = file.integer("expand", 2);
  const json* rank = file.find("time_step_rank");
  model.dt_rank = rank == nullptr || *rank == "auto" ? 0 : file.integer("time_step_rank");
  TWOBP_CHECK(rank == nullptr || *rank == "auto" || model.dt_rank > 0, file.origin, ": time_step_rank is 0");
  model.norm_eps = file.number("layer_norm_epsilon", 1e-5);
  model.tied = file.boolean("tie_word_embeddings", true);
  TWOBP_CHECK(model.conv_kernel <= kMaxConvKernel, file.origin, ": conv_kernel ", model.conv_kernel,
              " is not supported: ", kMaxConvKernel, " at most");
  model.dt_rank = dt_rank_of(model);
}

void write_mamba(const MambaOptions& config, json& out) {
  out.update({{"hidden_size", config.dim},
              {"num_hidden_layers", config.layers},
              {"vocab_size", config.vocab},
              {"state_size", config.state},
              {"conv_kernel", config.conv_kernel},
              {"expand", config.expand},
              {"intermediate_size", config.expand * config.dim},
              {"time_step_rank", dt_rank_of(config)},
              {"layer_norm_epsilon", config.norm_eps},
              {"tie_word_embeddings", config.tied},
              {"hidden_act", "silu"},
              {"use_bias", false},
              {"use_conv_bias", true}});
}

// The first converted models use this other name, and transformers reads them too.
std::string rename_mamba(const std::string& stored) {
  return stored == "backbone.embedding.weight" ? kMambaEmbedding : stored;
}

TensorNames mamba_names(const MambaOptions& o) {
  TensorNames names;
  names.rename = rename_mamba;
  if (o.tied) names.copies[kMambaHead] = kMambaEmbedding;
  return names;
}

std::vector<Key> mamba_keys() {
  using O = MambaOptions;
  return {
      TWOBP_KEY(O, dim, "width of the model").in("features").from(1, kMaxWidth),
      TWOBP_KEY(O, layers, "depth of the model").in("blocks").from(1, kMaxCount),
      vocab_key<O>(),
      TWOBP_KEY(O, norm_eps, "added to the mean square in RMSNorm").above(0),
      TWOBP_KEY(O, tied, "input and output embeddings share one matrix"),
      TWOBP_KEY(O, state, "size of the state of each channel of the scan").in("numbers").from(1, kMaxCount),
      TWOBP_KEY(O, conv_kernel, "width of the convolution, 16 at most").in("positions").from(1, kMaxCount),
      TWOBP_KEY(O, expand, "channels of the scan in multiples of dim").from(1, kMaxCount),
      TWOBP_KEY(O, dt_rank, "width of delta, the scan's step size, before dt_proj; 0: dim / 16, rounded up")
          .in("features")
          .from(0, kMaxWidth),
      init_std_key<O>(),
  };
}

}  // namespace

ModelSpec mamba(const MambaOptions& o, const BuildSettings& s) {
  TWOBP_CHECK(o.layers >= 1 && o.dim >= 1 && o.vocab >= 1 && o.state >= 1 && o.expand >= 1 && o.dt_rank >= 0,
              "a Mamba needs at least one layer, dim, vocab, state and expand of at least 1");
  const MambaMixerShape shape{o.dim, o.expand * o.dim, o.state, o.conv_kernel, dt_rank_of(o)};
  ModelSpec model;
  model.layers.push_back({"backbone.embeddings", "embedding", [o, s] {
                            return std::make_unique<Embedding>(kMambaEmbedding, o.vocab, o.dim, o.init_std, s.dtype);
                          }});
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string block = "backbone.layers." + std::to_string(i);
    model.layers.push_back(
        {block + ".in_proj", "in_proj", [o, s, shape, block] {
           return std::make_unique<ResidualBegin>(make_sequential(
               std::make_unique<RmsNorm>(block + ".norm.weight", o.dim, o.norm_eps, s.dtype),
               make_linear({{block + ".mixer.in_proj.weight", 2 * shape.inner, {{shape.inner, shape.inner}}}}, o.dim,
                           o.init_std, s.dtype, s.lora)));
         }});
    model.layers.push_back({block + ".mixer", "mixer", [o, s, shape, block] {
                              return std::make_unique<ResidualEnd>(
                                  std::make_unique<MambaMixer>(block + ".mixer", shape, o.init_std, s.dtype, s.lora));
                            }});
  }
  const std::string head = o.tied ? kMambaEmbedding : kMambaHead;
  model.layers.push_back({"lm_head", "head", [o, s, head] {
                            return make_sequential(
                                std::make_unique<RmsNorm>("backbone.norm_f.weight", o.dim, o.norm_eps, s.dtype),
                                make_linear({{head, o.vocab}}, o.dim, o.init_std, s.dtype, s.lora),
                                std::make_unique<CrossEntropy>());
                          }});
  return model;
}

ModelType mamba_type() {
  ModelType type = make_model_type<MambaOptions>(mamba_keys());
  type.hf_type = "mamba";
  type.hf_class = "MambaForCausalLM";
  type.names = [](const ModelOptions& o) { return mamba_names(o.as<MambaOptions>()); };
  type.lora = true;
  type.peft_task = "CAUSAL_LM";
  // transformers reads their weights without the adapter. PEFT refuses the first.
  type.peft_excludes = {"out_proj", "dt_proj"};
  type.reduced_precision = true;
  type.input = [](const ModelOptions& o) {
    ModelInput input;
    input.vocab = o.as<MambaOptions>().vocab;
    return input;
  };
  type.fill_in = [](ModelOptions& o) { o.as<MambaOptions>().dt_rank = dt_rank_of(o.as<MambaOptions>()); };
  type.check = [](const ModelOptions& o) {
    const int64_t kernel = o.as<MambaOptions>().conv_kernel;
    TWOBP_CHECK(kernel <= kMaxConvKernel, "model.conv_kernel (", kernel, ") is above ", kMaxConvKernel,
                ", the widest that is supported.");
  };
  type.no_slices = [](const ModelOptions&) { return std::string(); };
  type.build = [](const ModelOptions& o, const BuildSettings& s) { return mamba(o.as<MambaOptions>(), s); };
  type.read_hf = [](const CheckedJson& file, ModelOptions& o) { read_mamba(file, o.as<MambaOptions>()); };
  type.write_hf = [](const ModelOptions& o, int64_t /*sequence*/, json& out) {
    write_mamba(o.as<MambaOptions>(), out);
  };
  return type;
}

}  // namespace twobp
