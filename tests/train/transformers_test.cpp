// Against transformers itself: models that it saved give its logits and loss here, the weights after one step
// of SGD are its own, whatever the stages, and what is saved here it loads again, to the bit. Skipped where
// Python has no transformers.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/nn/layers/rope.h"
#include "twobp/train/build_model.h"
#include "twobp/train/load_model.h"
#include "twobp/train/python.h"
#include "twobp/train/save_model.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::same_bits;

constexpr double kTolerance = 1e-5;
const std::vector<std::string> kCases = {"grouped", "tied", "plain"};

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
    int64_t row = 0;
    for (const ParameterPart& part : parameter->parts()) {
      parts[part.name] = parameter->master.narrow(0, row, part.rows);
      row += part.rows;
    }
  }
  return parts;
}

class Transformers : public ::testing::Test {
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
    const std::string script = read(TWOBP_SOURCE_DIR "/tests/train/transformers_oracle.py");
    PythonProcess python("transformers_oracle.py", script, {command, folder_->path("")}, /*timeout=*/300);
    return python.read_line();
  }
  static std::string path(const std::string& name) { return folder_->path(name); }
  static json facts(const std::string& folder) { return json::parse(read(path(folder + "/facts.json"))); }

  static Config config_of(const std::string& name, int stages) {
    Config config = load_config(
        "", {"model.from=" + path(name + "/model"), "data.arrays=" + path(name + "/data"), "data.sequence=32",
             "data.held_out=0", "data.shuffle=false", "optimizer.type=sgd", "optimizer.weight_decay=0",
             "optimizer.schedule=constant", "pipeline.micro_batches=2", "pipeline.micro_batch_size=2",
             "pipeline.pin=false", concat("pipeline.stages=", stages)});
    config.optimizer.lr = facts(name).at("lr").get<double>();
    return config;
  }

 private:
  static test::TempFolder* folder_;
  static std::string made_;
};

test::TempFolder* Transformers::folder_ = nullptr;
std::string Transformers::made_;

TEST_F(Transformers, LogitsAreItsOwn) {
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
    load_weights(parameters, ModelWeights(config.model.from));
    const DataSplit data = open_data(config.data, config.model, 1);
    const Fields fields = data.train->read({0, 1, 2, 3}, 0);
    Context context;
    context.fields = &fields;
    context.training = false;
    context.generating = true;  // the head gives logits
    context.capacity = 32;
    std::vector<Saved> saved(layers.size());
    Values x;
    for (size_t i = 0; i < layers.size(); ++i) x = layers[i]->forward(std::move(x), context, saved[i]);
    const SafetensorsFile expected(path(name + "/logits.safetensors"));
    EXPECT_LT(relative_error(x[0], expected.tensor("logits")), kTolerance) << name;
  }
}

TEST_F(Transformers, LossAndAStepOfSgdAreItsOwn) {
  for (const std::string& name : kCases) {
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile after(path(name + "/after.safetensors"));
    const auto loss = facts(name).at("loss").get<double>();
    for (const int stages : {1, 2, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Trainer trainer(config_of(name, stages));
      for (const auto& [part, value] : parts_of(trainer.weights())) {
        EXPECT_TRUE(same_bits(value, before.tensor(part))) << part;
      }
      EXPECT_NEAR(trainer.step().loss, loss, kTolerance * loss);
      const auto parts = parts_of(trainer.weights());
      ASSERT_EQ(parts.size(), after.names().size());
      for (const auto& [part, value] : parts) {
        const at::Tensor expected = after.tensor(part);
        EXPECT_LT(relative_error(value, expected), kTolerance) << part;
        // Steps are much smaller than weights: they are compared too, within what float32 leaves of the
        // difference.
        const at::Tensor step = expected - before.tensor(part);
        EXPECT_GT(step.abs().max().item<double>(), 1e-4) << part;
        EXPECT_LT(relative_error(value - before.tensor(part), step), 1e-3) << part;
      }
    }
  }
}

TEST_F(Transformers, LoadsWhatIsSaved) {
  std::map<std::string, std::map<std::string, at::Tensor>> expected;
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 2);
    Trainer trainer(config);
    const auto save = [&](const std::string& to, const SaveModelOptions& options) {
      save_model(path(name + "/" + to), config.model, config.data.sequence, trainer.weights(), options);
    };
    save("saved", {});
    trainer.step();
    save("saved-trained", {.max_shard_bytes = 9000});
    save("saved-bf16", {.dtype = "bfloat16"});
    for (const auto& [part, value] : parts_of(trainer.weights())) expected[name][part] = value.clone();
  }
  ASSERT_EQ(oracle("check"), "ok");
  for (const std::string& name : kCases) {
    SCOPED_TRACE(name);
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile saved(path(name + "/saved/weights.safetensors"));
    const SafetensorsFile trained(path(name + "/saved-trained/weights.safetensors"));
    const SafetensorsFile bf16(path(name + "/saved-bf16/weights.safetensors"));
    EXPECT_EQ(saved.names(), before.names());
    EXPECT_EQ(trained.names(), before.names());
    EXPECT_EQ(bf16.names(), before.names());
    for (const std::string& part : before.names()) {
      EXPECT_TRUE(same_bits(saved.tensor(part), before.tensor(part))) << part;
      EXPECT_TRUE(same_bits(trained.tensor(part), expected[name][part])) << part;
      EXPECT_TRUE(same_bits(bf16.tensor(part), expected[name][part].to(at::kBFloat16))) << part;
    }
    EXPECT_TRUE(fs::exists(path(name + "/saved-trained/model.safetensors.index.json")));
    const json original = facts(name);
    for (const char* to : {"/saved", "/saved-trained", "/saved-bf16"}) {
      const json again = facts(name + to);
      for (const char* fact : {"inv_freq", "tied", "bos", "positions"}) {
        EXPECT_EQ(again.at(fact), original.at(fact)) << to << " " << fact;
      }
      EXPECT_EQ(again.at("dtype"), std::string(to) == "/saved-bf16" ? "torch.bfloat16" : "torch.float32");
    }
  }
}

TEST_F(Transformers, FrequenciesAreItsOwn) {
  for (const std::string& name : kCases) {
    const ModelConfig model = config_of(name, 1).model;
    const RopeSettings rope{model.rope_theta,     parse_rope_scaling(model.rope_scaling),
                            model.rope_factor,    model.rope_low_freq,
                            model.rope_high_freq, model.rope_original_positions};
    const auto expected = facts(name).at("inv_freq").get<std::vector<double>>();
    const at::Tensor actual = rope_frequencies(rope, model.head_dim);
    ASSERT_EQ(actual.numel(), static_cast<int64_t>(expected.size()));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(actual[static_cast<int64_t>(i)].item<double>(), expected[i], 1e-6 * expected[i])
          << name << i;
    }
  }
}

}  // namespace
}  // namespace twobp
