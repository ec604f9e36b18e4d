// Tests adapters from other programs: the accepted contents of PEFT's adapter_config.json, and the settings that are
// refused because they would give another adapter. Also tests the files that are written for PEFT.
#include <cmath>
#include <filesystem>
#include <memory>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_error;
using test::TempFolder;

// Returns the file that PEFT 0.21.2 writes for LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj", "v_proj"]).
json of_peft() {
  return json::parse(R"({
    "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
    "base_model_name_or_path": "model", "bias": "none", "corda_config": null, "ensure_weight_tying": false,
    "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true,
    "init_lora_weights": true, "kasa_config": null, "layer_replication": null, "layers_pattern": null,
    "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 16, "lora_bias": false, "lora_dropout": 0.0,
    "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core", "modules_to_save": null,
    "monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 2,
    "rank_pattern": {}, "revision": null, "target_modules": ["q_proj", "v_proj"], "target_parameters": null,
    "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null, "use_dora": false,
    "use_qalora": false, "use_rslora": false, "velora_config": null})");
}

class AdapterFiles : public ::testing::Test {
 protected:
  AdapterFiles() : config_(test::tiny_config()) {
    config_.model.lora = 2;
    trainer_ = std::make_unique<Trainer>(config_);
    save_adapter(folder_.path("adapter"), config_.model, trainer_->weights());
  }
  void load(const json& description) const {
    folder_.write("adapter/adapter_config.json", description.dump());
    load_adapter(folder_.path("adapter"), config_.model, build_model(config_.model), trainer_->weights());
  }
  void accept(const std::string& key, const json& value) const {
    json description = of_peft();
    description[key] = value;
    EXPECT_NO_THROW(load(description)) << key << " " << value;
  }
  void refuse(const std::string& key, const json& value, std::vector<std::string> parts = {"merge"}) const {
    SCOPED_TRACE(key);
    json description = of_peft();
    description[key] = value;
    parts.insert(parts.end(), {"adapter_config.json", key + " is "});
    expect_error([&] { load(description); }, parts);
  }

  TempFolder folder_;
  Config config_;
  std::unique_ptr<Trainer> trainer_;
};

TEST_F(AdapterFiles, AcceptTheFileOfPeft) {
  EXPECT_NO_THROW(load(of_peft()));
  accept("inference_mode", false);
  accept("task_type", nullptr);
  accept("base_model_name_or_path", nullptr);
  accept("peft_version", "0.99.0");
  accept("target_modules", "all-linear");  // the tensors show its meaning
  for (const char* start : {"gaussian", "eva", "orthogonal"}) accept("init_lora_weights", start);
  accept("init_lora_weights", false);
  accept("eva_config", {{"rho", 2.0}});
  accept("of_a_later_version", nullptr);
  accept("of_a_later_version", false);
  accept("of_a_later_version", json::object());
}

// With these settings, PEFT also changes the model's weights, or computes something else.
TEST_F(AdapterFiles, RefuseOtherSettingsByName) {
  for (const char* start : {"pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "mica", "new"}) {
    refuse("init_lora_weights", start);
  }
  for (const char* key : {"use_rslora", "use_dora", "use_qalora", "fan_in_fan_out", "lora_bias", "ensure_weight_tying",
                          "of_a_later_version"}) {
    refuse(key, true);
  }
  for (const char* key : {"corda_config", "lora_ga_config", "kasa_config", "velora_config", "arrow_config",
                          "use_bdlora", "monteclora_config", "megatron_config", "loftq_config", "rank_pattern",
                          "alpha_pattern", "of_a_later_version"}) {
    refuse(key, {{"q_proj", 4}});
  }
  for (const char* key : {"modules_to_save", "layer_replication", "layers_to_transform", "exclude_modules",
                          "target_parameters", "trainable_token_indices", "alora_invocation_tokens"}) {
    refuse(key, {1});
  }
  refuse("of_a_later_version", 0.5);
  refuse("of_a_later_version", "slow");
  refuse("bias", "all");
  refuse("lora_dropout", 0.05, {"0.05", "set it to 0"});
}

// PEFT adapts the modules that target_modules names, and leaves other tensors out.
TEST_F(AdapterFiles, RefuseTensorsThatAreNotTargets) {
  json description = of_peft();
  description["target_modules"] = {"q_proj", "self_attn.v_proj", "up_proj"};
  EXPECT_NO_THROW(load(description));
  for (const char* other : {"v_pro", "_proj", "attn.v_proj"}) {
    description["target_modules"] = {"q_proj", other};
    expect_error([&] { load(description); }, {"v_proj.lora_A.weight", "target_modules", "PEFT does not use it"});
  }
}

TEST_F(AdapterFiles, StoreLowerPrecisions) {
  for (const auto& [name, type] : {std::pair{"bfloat16", at::kBFloat16}, {"float16", at::kHalf}}) {
    save_adapter(folder_.path(name), config_.model, trainer_->weights(), name);
    const SafetensorsFile saved(folder_.path(name) + "/adapter_model.safetensors");
    const SafetensorsFile exact(folder_.path("adapter/adapter_model.safetensors"));
    ASSERT_EQ(saved.names(), exact.names());
    for (const std::string& part : exact.names()) {
      EXPECT_TRUE(test::same_bits(saved.tensor(part), exact.tensor(part).to(type))) << part;
    }
  }
}

TEST_F(AdapterFiles, ReportADamagedAdapter) {
  for (Parameter* weight : trainer_->weights()) {
    if (weight->name().ends_with("1.self_attn.v_proj.lora_B.weight")) weight->master[0][1].fill_(NAN);
  }
  expect_error([&] { save_adapter(folder_.path("none"), config_.model, trainer_->weights()); },
               {"1.self_attn.v_proj.lora_B.weight", "not finite", "nothing is saved"});
  EXPECT_FALSE(std::filesystem::exists(folder_.path("none")));
  const SafetensorsFile file(folder_.path("adapter/adapter_model.safetensors"));
  NamedTensors tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.tensor(name).clone());
  NamedTensors whole = tensors;
  whole.emplace_back("base_model.model.lm_head.base_layer.weight", at::ones({1}));
  write_safetensors(folder_.path("adapter/adapter_model.safetensors"), whole, {});
  expect_error([&] { load(of_peft()); }, {"lm_head.base_layer.weight", "merge"});
  tensors.back().second[0][1].fill_(INFINITY);
  write_safetensors(folder_.path("adapter/adapter_model.safetensors"), tensors, {});
  expect_error([&] { load(of_peft()); }, {tensors.back().first, "not finite", "damaged"});
}

// PEFT has no task for masked words. It finds the class by its name.
TEST(AdapterDescription, NamesTheClassOfABert) {
  const TempFolder folder;
  const auto written = [&](const ModelOptions& type) {
    ModelConfig config;
    config.type = type;
    config.from = "from";
    config.lora = 2;
    Parameter a({{"module.lora_A.weight", 2}}, {2, 3}, at::kFloat, 1);
    a.allocate_value(1);
    save_adapter(folder.path("adapter"), config, {&a});
    return json::parse(test::read_file(folder.path("adapter/adapter_config.json")));
  };
  const json bert = written(BertOptions{});
  EXPECT_EQ(bert.at("task_type"), nullptr);
  EXPECT_EQ(bert.at("auto_mapping"), (json{{"base_model_class", "BertForMaskedLM"},
                                           {"parent_library", "transformers.models.bert.modeling_bert"}}));
  for (const ModelOptions& type : {ModelOptions(DecoderOptions{}), ModelOptions(MambaOptions{})}) {
    const json description = written(type);
    EXPECT_EQ(description.at("task_type"), "CAUSAL_LM");
    EXPECT_EQ(description.at("auto_mapping"), nullptr);
  }
}

// An adapter that PEFT could not load is reported before the training.
TEST(AdapterDescription, IsRefusedIfPeftCannotLoadIt) {
  const auto check = [](const ModelOptions& type, const std::vector<std::string>& targets, const std::string& from,
                        const std::string& lora) {
    Config config = test::tiny_config();
    config.model.type = type;
    config.model.from = from;
    config.model.lora = 2;
    config.model.lora_targets = targets;
    config.save.lora = lora;
    check_config(config);
  };
  const std::vector<std::string> both = {"in_proj", "mixer.out_proj"};
  expect_error([&] { check(MambaOptions{}, both, "from", "adapter"); },
               {"save.lora", "PEFT", "out_proj", "mamba", "merged"});
  expect_error([&] { check(MambaOptions{}, {"dt_proj"}, "from", "adapter"); }, {"dt_proj", "mamba"});
  EXPECT_NO_THROW(check(MambaOptions{}, both, "from", "merged"));
  EXPECT_NO_THROW(check(MambaOptions{}, {"in_proj", "x_proj"}, "from", "adapter"));
  EXPECT_NO_THROW(check(DecoderOptions{}, {"o_proj"}, "from", "adapter"));
  expect_error([&] { check(DecoderOptions{}, {"o_proj"}, "", "adapter"); },
               {"save.lora", "model.from is empty", "merged"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
