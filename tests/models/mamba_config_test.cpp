// Tests config.json of a Mamba: its contents, defaults, and what is refused.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/models/hf_config.h"
#include "twobp/models/model_type.h"
#include "twobp/train/check_config.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_error;

json mamba_json() {
  return {{"model_type", "mamba"},
          {"architectures", {"MambaForCausalLM"}},
          {"hidden_size", 770},
          {"num_hidden_layers", 24},
          {"state_size", 8},
          {"conv_kernel", 3},
          {"expand", 3},
          {"time_step_rank", 40},
          {"vocab_size", 50280},
          {"layer_norm_epsilon", 1e-4},
          {"intermediate_size", 999},
          {"tie_word_embeddings", false}};
}

MambaOptions read(const json& content) {
  const test::TempFolder folder;
  folder.write("config.json", content.dump());
  return read_hf_config(folder.path("")).as<MambaOptions>();
}

TEST(MambaConfig, ReadsTheArchitecture) {
  const MambaOptions config = read(mamba_json());
  EXPECT_EQ(config.dim, 770);
  EXPECT_EQ(config.layers, 24);
  EXPECT_EQ(config.state, 8);
  EXPECT_EQ(config.conv_kernel, 3);
  EXPECT_EQ(config.expand, 3);
  EXPECT_EQ(config.dt_rank, 40);
  EXPECT_EQ(config.vocab, 50280);
  EXPECT_EQ(config.norm_eps, 1e-4);
  EXPECT_FALSE(config.tied);
}

// Missing keys have the defaults of transformers' MambaConfig.
TEST(MambaConfig, HasTheDefaultsOfTransformers) {
  const MambaOptions config =
      read({{"model_type", "mamba"}, {"hidden_size", 770}, {"num_hidden_layers", 2}, {"vocab_size", 300}});
  EXPECT_EQ(config.state, 16);
  EXPECT_EQ(config.conv_kernel, 4);
  EXPECT_EQ(config.expand, 2);
  EXPECT_EQ(config.dt_rank, 49) << "770 / 16 rounded up";
  EXPECT_EQ(config.norm_eps, 1e-5);
  EXPECT_TRUE(config.tied);
  json automatic = mamba_json();
  automatic["time_step_rank"] = "auto";
  EXPECT_EQ(read(automatic).dt_rank, 49);
}

TEST(MambaConfig, ComesBackAsWritten) {
  const MambaOptions config = read(mamba_json());
  ModelConfig model;
  model.type = config;
  const json written = hf_config_json(model, 64, "float32");
  EXPECT_EQ(written.at("architectures").at(0), "MambaForCausalLM");
  EXPECT_EQ(written.at("intermediate_size"), 3 * 770);
  const MambaOptions again = read(written);
  EXPECT_EQ(again.dim, config.dim);
  EXPECT_EQ(again.layers, config.layers);
  EXPECT_EQ(again.state, config.state);
  EXPECT_EQ(again.conv_kernel, config.conv_kernel);
  EXPECT_EQ(again.expand, config.expand);
  EXPECT_EQ(again.dt_rank, config.dt_rank);
  EXPECT_EQ(again.vocab, config.vocab);
  EXPECT_EQ(again.norm_eps, config.norm_eps);
  EXPECT_EQ(again.tied, config.tied);
}

// transformers renames it, too.
TEST(MambaConfig, RenamesTheOldEmbedding) {
  const auto rename = model_type("mamba").names(MambaOptions()).rename;
  EXPECT_EQ(rename("backbone.embedding.weight"), "backbone.embeddings.weight");
  EXPECT_EQ(rename("backbone.norm_f.weight"), "backbone.norm_f.weight");
}

TEST(MambaConfig, RefusesUnsupportedSettings) {
  const auto refuse = [](const std::string& key, const json& value, std::vector<std::string> parts) {
    json content = mamba_json();
    content[key] = value;
    parts.insert(parts.end(), {"config.json", key});
    expect_error([&] { read(content); }, parts);
  };
  refuse("use_bias", true, {});
  refuse("use_conv_bias", false, {"bias"});
  refuse("hidden_act", "gelu", {"gelu", "silu"});
  refuse("conv_kernel", 17, {"17", "16"});
  refuse("time_step_rank", 0, {"0"});
  refuse("time_step_rank", "some", {"some"});
  refuse("state_size", "x", {});
  refuse("hidden_size", nullptr, {});
  json wrong = mamba_json();
  wrong["architectures"] = {"MambaForSomethingElse"};
  expect_error([&] { read(wrong); }, {"MambaForCausalLM"});
  json zero = mamba_json();
  zero["state_size"] = 0;
  expect_error([&] { read(zero); }, {"model.state", "from 1"});
  Config config = test::tiny_config();
  test::make_mamba(config).conv_kernel = 17;
  expect_error([&] { check_config(config); }, {"model.conv_kernel (17)", "16"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
