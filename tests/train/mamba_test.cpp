// Tests training of a Mamba: learning, concatenation, freezing, and the accepted contents of config.json.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/models/hf_config.h"
#include "twobp/models/model_type.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/build_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_error;
using test::Outcome;
using test::random_batches;

constexpr int kLayers = 10;  // embedding, 4 blocks of two, head

// The 260 channels make two groups in the scan.
Config config_of(bool tied, const std::vector<int>& split) {
  Config config = test::tiny_config();
  MambaOptions& mamba = test::make_mamba(config);
  mamba.dim = 130;
  mamba.layers = 4;
  mamba.state = 5;
  mamba.tied = tied;
  config.train.clip_norm = 0.5;
  config.pipeline.stages = static_cast<int>(split.size());
  config.pipeline.split = split;
  return config;
}

TEST(Mamba, LearnsARepeatedBatch) {
  Config config = config_of(true, {4, 6});
  config.optimizer.lr = 3e-3;
  std::vector<Batch> batches;
  for (int i = 0; i < 20; ++i) batches.push_back(test::random_batch(2, 2, 2, 1));
  for (const char* precision : {"fp32", "bf16"}) {
    config.train.precision = precision;
    const Outcome outcome = test::train(config, batches, {"1f1b", P2Policy::kFill});
    EXPECT_LT(outcome.losses.back(), 0.5 * outcome.losses.front()) << precision;
  }
}

TEST(Mamba, ConcatenatedWGivesTheSameUpToRounding) {
  const auto batches = random_batches(1, 3);
  const Outcome expected = test::train(config_of(true, {4, 6}), batches, {"gpipe", P2Policy::kEnd});
  const Outcome actual = test::train(config_of(true, {4, 6}), batches, {"gpipe", P2Policy::kEnd, P2Batching::kConcat});
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_NEAR(actual.norms[0], expected.norms[0], 1e-5 * expected.norms[0]);
}

TEST(Mamba, KeepsFrozenProjections) {
  const auto batches = random_batches(2, 2);
  Config frozen = config_of(true, {4, 6});
  frozen.model.freeze = {"*.A_log", "*in_proj*", "*conv1d*"};
  Trainer trainer(frozen);
  const auto before = test::copies_of(trainer.weights());
  for (const Batch& batch : batches) trainer.step(batch, {"1f1b", P2Policy::kFill});
  const auto weights = trainer.weights();
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool stays = weights[i]->name().find("A_log") != std::string::npos ||
                       weights[i]->name().find("in_proj") != std::string::npos ||
                       weights[i]->name().find("conv1d") != std::string::npos;
    EXPECT_EQ(test::same_bits(weights[i]->value, before[i]), stays) << weights[i]->name();
  }
}

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
  Config config = config_of(true, {kLayers});
  config.model.type.as<MambaOptions>().conv_kernel = 17;
  expect_error([&] { check_config(config); }, {"model.conv_kernel (17)", "16"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
