// Weights of a directory into a model: the parts of packed ones, every float type, frozen ones and adapters,
// and what is said of a directory that does not fit.
#include "twobp/train/weights/load_model.h"

#include <filesystem>
#include <functional>
#include <map>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/models/hf_config.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/train/build_model.h"
#include "twobp/train/weights/save_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::same_bits;
using test::TempFolder;
using Tensors = std::map<std::string, at::Tensor>;

Tensors parts_of(const std::vector<Parameter*>& parameters) {
  Tensors parts;
  for (const Parameter* parameter : parameters) {
    int64_t row = 0;
    for (const ParameterPart& part : parameter->parts()) {
      parts[part.name] = parameter->master.narrow(0, row, part.rows).clone();
      row += part.rows;
    }
  }
  return parts;
}

// A directory with the tiny LLaMa as it is initialised from seed 1234, and a configuration that starts from
// it.
class LoadModel : public ::testing::Test {
 protected:
  LoadModel() { make(false); }

  void make(bool tied) {
    Config config = test::tiny_config();
    test::llama_of(config).tied = tied;
    config.train.seed = 1234;
    Trainer trainer(config);
    save_model(folder_.path("model"), config.model, config.data.sequence, trainer.weights());
    tensors_ = parts_of(trainer.weights());
    config_ = test::tiny_config();
    config_.model.from = folder_.path("model");
    config_.model.type = read_hf_config(config_.model.from);
  }

  void write(const std::function<void(Tensors&)>& change) const {
    Tensors changed = tensors_;
    change(changed);
    write_safetensors(folder_.path("model/model.safetensors"), {changed.begin(), changed.end()}, {});
  }
  void refuse(const std::function<void(Tensors&)>& change, std::vector<std::string> parts) const {
    write(change);
    parts.push_back(folder_.path("model"));
    expect_error([&] { Trainer{config_}; }, parts);
  }

  TempFolder folder_;
  Tensors tensors_;
  Config config_;
};

TEST_F(LoadModel, EveryRankGetsItsParts) {
  for (const bool tied : {false, true}) {
    make(tied);
    EXPECT_EQ(test::llama_of(config_).tied, tied);
    for (const int stages : {1, 2, 3, 8}) {
      config_.pipeline.stages = stages;
      Trainer trainer(config_);
      const Tensors loaded = parts_of(trainer.weights());
      ASSERT_EQ(loaded.size(), tensors_.size());
      for (const auto& [name, value] : loaded) EXPECT_TRUE(same_bits(value, tensors_.at(name))) << name;
      // Both uses of a tied weight, wherever they are.
      const Tensors last = parts_of(trainer.pipeline()
                                        .stage(stages - 1)
                                        .parameters(trainer.pipeline().stage(stages - 1).layer_count() - 1));
      const std::string head = tied ? "model.embed_tokens.weight" : "lm_head.weight";
      EXPECT_TRUE(same_bits(last.at(head), tensors_.at(head)));
    }
  }
}

TEST_F(LoadModel, TrainsAsTheModelItWasSavedFrom) {
  Config original = test::tiny_config();
  original.train.seed = 1234;
  const auto batches = test::random_batches(2, 2);
  for (const bool tied : {false, true}) {
    make(tied);
    test::llama_of(original).tied = tied;
    for (const int stages : {1, 3}) {
      original.pipeline.stages = config_.pipeline.stages = stages;
      const Variant variant{"1f1b", P2Policy::kFill};
      test::expect_same_bits(test::train(original, batches, variant), test::train(config_, batches, variant),
                             concat("tied ", tied, ", stages ", stages));
    }
  }
}

TEST_F(LoadModel, EveryFloatTypeConverts) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    write([&](Tensors& tensors) {
      for (auto& [name, tensor] : tensors) tensor = tensor.to(type);
    });
    const Tensors loaded = parts_of(Trainer(config_).weights());
    for (const auto& [name, value] : loaded) {
      EXPECT_TRUE(same_bits(value, tensors_.at(name).to(type).to(at::kFloat))) << name << " " << type;
    }
  }
}

TEST_F(LoadModel, LowPrecisionComputesWithTheRoundedWeights) {
  config_.train.precision = "bf16";
  config_.model.freeze = {"model.embed_tokens.weight"};
  config_.pipeline.stages = 2;
  Trainer trainer(config_);
  for (const Parameter* parameter : trainer.weights()) {
    const bool matrix = parameter->sizes().size() > 1;  // norms compute in float32
    EXPECT_EQ(parameter->value.scalar_type(), matrix ? at::kBFloat16 : at::kFloat);
    EXPECT_TRUE(same_bits(parameter->value, parameter->master.to(parameter->value.scalar_type())))
        << parameter->name();
  }
  for (const auto& [name, value] : parts_of(trainer.weights())) {
    const bool frozen = name == "model.embed_tokens.weight";
    EXPECT_TRUE(same_bits(value, frozen ? tensors_.at(name).to(at::kBFloat16) : tensors_.at(name))) << name;
  }
}

TEST_F(LoadModel, AdaptersStayAsTheyAreInitialised) {
  Config fresh = test::tiny_config();
  fresh.model.lora = config_.model.lora = 2;
  const Tensors expected = parts_of(Trainer(fresh).weights());
  const Tensors loaded = parts_of(Trainer(config_).weights());
  ASSERT_EQ(loaded.size(), tensors_.size() + 12);  // A and B of q and v in three blocks
  for (const auto& [name, value] : loaded) {
    const bool adapter = name.find(".lora_") != std::string::npos;
    EXPECT_TRUE(same_bits(value, adapter ? expected.at(name) : tensors_.at(name))) << name;
  }
}

TEST_F(LoadModel, ParametersOfASingleThread) {
  const auto model = build_model(config_.model);
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<Parameter*> parameters;
  for (const LayerSpec& spec : model.layers) {
    layers.push_back(spec.make());
    layers.back()->collect_parameters(parameters);
  }
  for (Parameter* parameter : parameters) parameter->allocate_value(5);
  load_weights(parameters, ModelWeights(config_.model.from));
  for (const auto& [name, value] : parts_of(parameters))
    EXPECT_TRUE(same_bits(value, tensors_.at(name))) << name;
}

TEST_F(LoadModel, WhatMayBeThereBeside) {
  write([](Tensors& tensors) { tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({4}); });
  EXPECT_NO_THROW(Trainer{config_});
  make(true);
  write([](Tensors& tensors) { tensors["lm_head.weight"] = at::ones({3}); });
  EXPECT_NO_THROW(Trainer{config_});
}

TEST_F(LoadModel, RefusesWhatDoesNotFit) {
  const std::string k = "model.layers.1.self_attn.k_proj.weight";
  refuse([&](Tensors& t) { t.erase(k); }, {k + " is missing"});
  refuse([&](Tensors& t) { t.erase("lm_head.weight"); }, {"lm_head.weight is missing"});
  refuse([&](Tensors& t) { t["extra"] = at::ones({1}); }, {"extra is not known"});
  refuse([&](Tensors& t) { t[k] = at::ones({32, 32}); }, {k + " is [32, 32] instead of [16, 32]"});
  refuse([&](Tensors& t) { t[k] = at::ones({512}); }, {k + " is [512] instead of [16, 32]"});
  refuse([&](Tensors& t) { t[k] = at::ones({16, 32}, at::kLong); }, {k, "Long", "BF16"});
  refuse([&](Tensors& t) { t.clear(); }, {"model.embed_tokens.weight is missing", "and 25 more"});
  refuse(
      [&](Tensors& t) {
        t.erase(k);
        t["model.norm.weight"] = at::ones({1, 32});
        for (const char* name : {"a", "b", "c", "d"}) t[name] = at::ones({1});
      },
      {k + " is missing", "model.norm.weight is [1, 32] instead of [32]", "a is not known", "b is not known",
       "c is not known", "and 1 more"});
  test::llama_of(config_).layers = 4;  // as if config.json said so
  refuse([](Tensors&) {}, {"model.layers.3.input_layernorm.weight is missing"});
}

// What a config.json claims is not allocated before it is compared with the weights.
TEST_F(LoadModel, AHugeModelThatIsNotThere) {
  test::llama_of(config_).dim = 1 << 20;
  test::llama_of(config_).hidden = 1 << 22;
  test::llama_of(config_).vocab = 1 << 24;
  refuse([](Tensors&) {}, {"model.embed_tokens.weight is [64, 32] instead of [16777216, 1048576]", "more"});
}

TEST_F(LoadModel, UnknownTypesAreRefusedByName) {
  write([](Tensors& t) { t["model.norm.weight"] = at::ones({32}, at::kInt); });
  expect_error([&] { Trainer{config_}; }, {"model.norm.weight", "Int"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
