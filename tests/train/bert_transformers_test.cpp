// BERT against transformers itself: models that it saved give its logits and loss here (with padding and
// token types), the weights after one step of SGD are its own, whatever the stages, what is saved here it
// loads again, to the bit; encoders without a head get one. Skipped where Python has no transformers.
#include <filesystem>
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/train/architecture.h"
#include "twobp/train/build_model.h"
#include "twobp/train/load_model.h"
#include "twobp/train/python.h"
#include "twobp/train/save_model.h"

namespace twobp {
namespace {

using nlohmann::json;
using test::same_bits;

constexpr double kTolerance = 1e-5;
const std::vector<std::string> kCases = {"tied", "untied"};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Of the largest difference to the largest value.
double relative_error(const at::Tensor& actual, const at::Tensor& expected) {
  return ((actual - expected).abs().max() / expected.abs().max()).item<double>();
}

std::map<std::string, at::Tensor> parts_of(const std::vector<Parameter*>& parameters) {
  std::map<std::string, at::Tensor> parts;
  for (const Parameter* parameter : parameters) {
    for (const auto& [name, rows] : parameter->parts_of(parameter->master)) parts[name] = rows;
  }
  return parts;
}

class BertTransformers : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new test::TempFolder;
    made_ = oracle("make");
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }
  void SetUp() override {
    if (made_.starts_with("skip")) GTEST_SKIP() << made_;
    ASSERT_EQ(made_, "ok");
  }

  static std::string oracle(const std::string& command) {
    const std::string script = read(TWOBP_SOURCE_DIR "/tests/train/bert_oracle.py");
    PythonProcess python("bert_oracle.py", script, {command, folder_->path("")}, /*timeout=*/300);
    return python.read_line();
  }
  static std::string path(const std::string& name) { return folder_->path(name); }
  static json facts(const std::string& folder) { return json::parse(read(path(folder + "/facts.json"))); }

  static Config config_of(const std::string& name, int stages, const std::string& model = "model") {
    Config config = load_config(
        "", {"model.from=" + path(name + "/" + model), "data.arrays=" + path(name + "/data"),
             "data.sequence=32", "data.held_out=0", "data.shuffle=false", "optimizer.type=sgd",
             "optimizer.weight_decay=0", "optimizer.schedule=constant", "pipeline.micro_batches=2",
             "pipeline.micro_batch_size=2", "pipeline.pin=false", concat("pipeline.stages=", stages)});
    config.optimizer.lr = facts(name).at("lr").get<double>();
    return config;
  }

 private:
  static test::TempFolder* folder_;
  static std::string made_;
};

test::TempFolder* BertTransformers::folder_ = nullptr;
std::string BertTransformers::made_;

TEST_F(BertTransformers, LogitsAreItsOwn) {
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 1);
    const ModelSpec model = build_model(config.model);
    std::vector<std::unique_ptr<Layer>> layers;
    std::vector<Parameter*> parameters;
    for (const LayerSpec& spec : model.layers) {
      layers.push_back(spec.make());
      layers.back()->collect_parameters(parameters);
    }
    for (Parameter* parameter : parameters) parameter->allocate_value(1);
    load_weights(parameters, ModelWeights(config.model.from, architecture("bert").names));
    const DataSplit data = open_data(config.data, config.model, 1);
    const Fields fields = data.train->read({0, 1, 2, 3}, 0);
    Context context;
    context.fields = &fields;
    context.training = false;
    context.generating = true;  // the head gives logits, of all positions
    std::vector<Saved> saved(layers.size());
    Values x;
    for (size_t i = 0; i < layers.size(); ++i) x = layers[i]->forward(std::move(x), context, saved[i]);
    const at::Tensor expected = SafetensorsFile(path(name + "/logits.safetensors")).tensor("logits").clone();
    const at::Tensor real = fields.at("attention_mask").ne(0).unsqueeze(2);  // padding attends as it likes
    EXPECT_LT(relative_error(x[0] * real, expected * real), kTolerance) << name;
  }
}

TEST_F(BertTransformers, LossAndAStepOfSgdAreItsOwn) {
  for (const std::string& name : kCases) {
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile after(path(name + "/after.safetensors"));
    const auto loss = facts(name).at("loss").get<double>();
    for (const int stages : {1, 2, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Trainer trainer(config_of(name, stages));
      EXPECT_TRUE(trainer.new_parameters().empty());
      for (const auto& [part, value] : parts_of(trainer.weights())) {
        EXPECT_TRUE(same_bits(value, before.tensor(part))) << part;
      }
      EXPECT_NEAR(trainer.step().loss, loss, kTolerance * loss);
      const auto parts = parts_of(trainer.weights());
      // Where the decoder is not tied, its bias is used, and transformers keeps another that is not.
      ASSERT_EQ(parts.size() + (name == "tied" ? 0 : 1), after.names().size());
      double largest_step = 0;
      for (const std::string& part : after.names()) {
        largest_step =
            std::max(largest_step, (after.tensor(part) - before.tensor(part)).abs().max().item<double>());
      }
      for (const auto& [part, value] : parts) {
        const at::Tensor expected = after.tensor(part);
        EXPECT_LT(relative_error(value, expected), kTolerance) << part;
        // A bias of the keys shifts all of a query's scores alike, so its gradient is 0 but for rounding.
        if (part.ends_with("key.bias")) {
          EXPECT_LT((value - before.tensor(part)).abs().max().item<double>(), 1e-5 * largest_step) << part;
          continue;
        }
        // Steps are much smaller than weights: they are compared too, within what float32 leaves of the
        // difference.
        const at::Tensor step = expected - before.tensor(part);
        EXPECT_GT(step.abs().max().item<double>(), 1e-4) << part;
        EXPECT_LT(relative_error(value - before.tensor(part), step), 1e-3) << part;
      }
    }
  }
}

TEST_F(BertTransformers, LoadsWhatIsSaved) {
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
  ASSERT_EQ(oracle("check"), "ok");
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
    // And here, with the same loss.
    Trainer again(config_of(name, 1, "saved"));
    Trainer shards(config_of(name, 3, "saved-shards"));
    EXPECT_EQ(again.step().loss, shards.step().loss);
  }
}

// An encoder alone: its tensors are loaded, whatever they are called, and a head is made and named.
TEST_F(BertTransformers, EncoderWithoutAHead) {
  for (const std::string& name : kCases) {
    const SafetensorsFile before(path(name + "/before.safetensors"));
    Trainer trainer(config_of(name, 2, "encoder"));
    const std::vector<std::string>& made = trainer.new_parameters();
    EXPECT_EQ(made.size(), name == "tied" ? 5u : 6u);
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
  json config = json::parse(read(from + "/config.json"));
  config["hidden_dropout_prob"] = 0.2;
  config["attention_probs_dropout_prob"] = 0.3;
  std::filesystem::create_directories(path("dropping"));
  std::ofstream(path("dropping/config.json")) << config.dump();
  const std::vector<std::string> common = {"model.from=" + path("dropping"),
                                           "data.arrays=" + path("tied/data"), "data.sequence=32"};
  const ModelConfig file = load_config("", common).model;
  EXPECT_EQ(file.dropout, 0.2);
  EXPECT_EQ(file.attention_dropout, 0.3);
  std::vector<std::string> given = common;
  given.push_back("model.dropout=0");
  const ModelConfig mixed = load_config("", given).model;
  EXPECT_EQ(mixed.dropout, 0);
  EXPECT_EQ(mixed.attention_dropout, 0.3);
}

}  // namespace
}  // namespace twobp
