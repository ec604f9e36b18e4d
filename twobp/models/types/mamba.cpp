// Mamba: MambaForCausalLM of transformers.
#include "twobp/models/mamba.h"

#include "twobp/core/check.h"
#include "twobp/nn/kernels/scan/scan_kernels.h"
#include "twobp/models/types/all.h"

namespace twobp {
namespace {

using nlohmann::json;

void fill_in(ModelConfig& config) {
  if (config.dt_rank == 0) config.dt_rank = (config.dim + 15) / 16;
}

void check(const ModelConfig& model) {
  TWOBP_CHECK(model.conv_kernel <= kMaxConvKernel, "model.conv_kernel (", model.conv_kernel, ") is above ",
              kMaxConvKernel, ", the widest that is supported.");
}

ModelSpec build(const ModelConfig& config, at::ScalarType dtype) {
  MambaOptions options;
  options.vocab = config.vocab;
  options.dim = config.dim;
  options.layers = config.layers;
  options.state = config.state;
  options.conv_kernel = config.conv_kernel;
  options.expand = config.expand;
  options.dt_rank = config.dt_rank;
  options.norm_eps = config.norm_eps;
  options.tied = config.tied;
  options.init_std = config.init_std;
  options.dtype = dtype;
  options.lora = {config.lora, config.lora_alpha, config.lora_targets};
  return mamba(options);
}

void read_hf(const HfSection& file, ModelConfig& model) {
  const std::string activation = file.text("hidden_act", "silu");
  TWOBP_CHECK(activation == "silu", file.origin, ": hidden_act ", shown(activation),
              " is not supported: \"silu\" is");
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
  fill_in(model);
}

void write_hf(const ModelConfig& given, int64_t /*sequence*/, json& out) {
  ModelConfig config = given;
  fill_in(config);
  out.update({{"hidden_size", config.dim},
              {"num_hidden_layers", config.layers},
              {"vocab_size", config.vocab},
              {"state_size", config.state},
              {"conv_kernel", config.conv_kernel},
              {"expand", config.expand},
              {"intermediate_size", config.expand * config.dim},
              {"time_step_rank", config.dt_rank},
              {"layer_norm_epsilon", config.norm_eps},
              {"tie_word_embeddings", config.tied},
              {"hidden_act", "silu"},
              {"use_bias", false},
              {"use_conv_bias", true}});
}

// The first converted models have it otherwise; transformers reads them too.
std::string rename(const std::string& stored) {
  return stored == "backbone.embedding.weight" ? "backbone.embeddings.weight" : stored;
}

}  // namespace

Architecture mamba_architecture() {
  Architecture mamba;
  mamba.type = "mamba";
  mamba.input = ModelInput::kTokens;
  mamba.hf_type = "mamba";
  mamba.hf_class = "MambaForCausalLM";
  mamba.names.rename = rename;
  mamba.lora = true;
  mamba.reduced_precision = true;
  mamba.fill_in = fill_in;
  mamba.check = check;
  mamba.build = build;
  mamba.read_hf = read_hf;
  mamba.write_hf = write_hf;
  return mamba;
}

}  // namespace twobp
