// Tests BERT against transformers itself. Models that transformers saved give its logits and loss here, with padding
// and token types. The weights after one step of SGD are the same for any number of stages. transformers loads the
// models that are saved here, to the bit. Encoders without a head get one. The tests are skipped if Python has no
// transformers.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/transformers_fixture.h"
#include "twobp/train/weights/save_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::parts_of;
using test::read_file;
using test::relative_error;
using test::same_bits;

const std::vector<std::string> kCases = {"tied", "untied"};

class BertTransformers : public test::TransformersTest {
 protected:
  static void SetUpTestSuite() { make_models("bert_oracle"); }
  static Config config_of(const std::string& name, int stages, const std::string& model = "model") {
    return sgd_config(name, stages, {"data.sequence=32", "pipeline.micro_batch_size=2"}, model);
  }
};

TEST_F(BertTransformers, LogitsAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 1);
    const Fields fields = samples(config, {0, 1, 2, 3}, 0);
    const at::Tensor real = fields.at("attention_mask").ne(0).unsqueeze(2);  // the output at padding does not count
    EXPECT_LT(relative_error(logits(config, fields) * real, expected_logits(name) * real), kTolerance) << name;
  }
}

TEST_F(BertTransformers, LossAndAStepOfSgdAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile after(path(name + "/after.safetensors"));
    const auto loss = facts(name).at("loss").get<double>();
    for (const int stages : {1, 2, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Trainer trainer(config_of(name, stages));
      EXPECT_TRUE(trainer.new_parameters().empty());
      expect_same_parts(parts_of(trainer.weights()), before);
      EXPECT_NEAR(trainer.step().loss, loss, kTolerance * loss);
      const auto parts = parts_of(trainer.weights());
      // If the decoder is not tied, its own bias is used. transformers keeps a second bias that it does not use.
      ASSERT_EQ(parts.size() + (name == "tied" ? 0 : 1), after.names().size());
      double largest_step = 0;
      for (const std::string& part : after.names()) {
        largest_step = std::max(largest_step, (after.tensor(part) - before.tensor(part)).abs().max().item<double>());
      }
      for (const auto& [part, value] : parts) {
        // A bias of the keys shifts all scores of a query by the same amount, so its gradient is 0 up to rounding.
        if (part.ends_with("key.bias")) {
          EXPECT_LT(relative_error(value, after.tensor(part)), kTolerance) << part;
          EXPECT_LT((value - before.tensor(part)).abs().max().item<double>(), 1e-5 * largest_step) << part;
          continue;
        }
        expect_same_step(part, value, before.tensor(part), after.tensor(part));
      }
    }
  }
}

TEST_F(BertTransformers, LoadsTheSavedModel) {
  std::map<std::string, std::map<std::string, at::Tensor>> expected;
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 2);
    Trainer trainer(config);
    trainer.step();
    save_model(path(name + "/saved"), config.model, config.data.sequence, trainer.weights(), {});
    save_model(path(name + "/saved-shards"), config.model, config.data.sequence, trainer.weights(),
               {.max_shard_bytes = 9000});
    for (const auto& [part, value] : parts_of(trainer.weights())) expected[name][part] = value.clone();
  }
  ASSERT_EQ(ask_oracle("check"), "ok");
  for (const std::string& name : kCases) {
    for (const char* to : {"/saved", "/saved-shards"}) {
      SCOPED_TRACE(name + to);
      const SafetensorsFile loaded(path(name + to + "/weights.safetensors"));
      ASSERT_EQ(loaded.names().size(), expected[name].size() + (name == "tied" ? 0 : 1));
      for (const auto& [part, value] : expected[name]) {
        EXPECT_TRUE(same_bits(loaded.tensor(part), value)) << part;
      }
      const json found = facts(name + to);
      EXPECT_EQ(found.at("problems"), name == "tied" ? json::array() : json{"cls.predictions.bias"});
      EXPECT_EQ(found.at("tied"), name == "tied");
      EXPECT_EQ(found.at("activation"), name == "tied" ? "gelu" : "gelu_new");
    }
    // The model is loaded here too, with the same loss.
    Trainer again(config_of(name, 1, "saved"));
    Trainer shards(config_of(name, 3, "saved-shards"));
    EXPECT_EQ(again.step().loss, shards.step().loss);
  }
}

// The file has an encoder only. Its tensors are loaded under any of their names. The trainer makes a head and lists it
// as new.
TEST_F(BertTransformers, AnEncoderGetsAHead) {
  for (const std::string& name : kCases) {
    const SafetensorsFile before(path(name + "/before.safetensors"));
    Trainer trainer(config_of(name, 2, "encoder"));
    const std::vector<std::string>& made = trainer.new_parameters();
    EXPECT_EQ(made.size(), name == "tied" ? 5u : 6u);
    EXPECT_EQ(trainer.unused_tensors(),
              name == "tied" ? (std::vector<std::string>{"pooler.dense.bias", "pooler.dense.weight"})
                             : (std::vector<std::string>{"bert.pooler.dense.bias", "bert.pooler.dense.weight"}));
    for (const auto& [part, value] : parts_of(trainer.weights())) {
      const bool is_new = std::find(made.begin(), made.end(), part) != made.end();
      EXPECT_EQ(is_new, part.starts_with("cls.")) << part;
      if (is_new) continue;
      EXPECT_TRUE(same_bits(value, before.tensor(part))) << part;
    }
    const double first = trainer.step().loss;
    EXPECT_TRUE(std::isfinite(first));
    save_model(path(name + "/whole"), trainer.config().model, 32, trainer.weights(), {});
    Trainer whole(config_of(name, 1, "whole"));
    EXPECT_TRUE(whole.new_parameters().empty());
    EXPECT_LT(whole.step().loss, first);
  }
}

TEST_F(BertTransformers, DropoutComesFromTheFileUnlessGiven) {
  const std::string from = path("tied/model");
  json config = json::parse(read_file(from + "/config.json"));
  config["hidden_dropout_prob"] = 0.2;
  config["attention_probs_dropout_prob"] = 0.3;
  std::filesystem::create_directories(path("dropping"));
  std::ofstream(path("dropping/config.json")) << config.dump();
  const std::vector<std::string> common = {"model.from=" + path("dropping"), "data.arrays=" + path("tied/data"),
                                           "data.sequence=32"};
  const BertOptions file = load_config("", common).model.type.as<BertOptions>();
  EXPECT_EQ(file.dropout, 0.2);
  EXPECT_EQ(file.attention_dropout, 0.3);
  std::vector<std::string> given = common;
  given.push_back("model.dropout=0");
  const BertOptions mixed = load_config("", given).model.type.as<BertOptions>();
  EXPECT_EQ(mixed.dropout, 0);
  EXPECT_EQ(mixed.attention_dropout, 0.3);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
