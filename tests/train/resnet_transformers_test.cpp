// A ResNet against transformers itself: models that it saved give its logits and loss here, and its weights
// and running statistics after one step of SGD, whatever the stages; what is saved here it loads again, to
// the bit. Skipped where Python has no transformers.
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/resnet_training.h"
#include "twobp/train/architecture.h"
#include "twobp/train/build_model.h"
#include "twobp/train/load_model.h"
#include "twobp/train/python.h"
#include "twobp/train/save_model.h"

namespace twobp {
namespace {

using nlohmann::json;
using test::copies_by_name;
using test::same_bits;

constexpr double kTolerance = 1e-5;
const std::vector<std::string> kCases = {"bottleneck", "basic", "deep"};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Of the largest difference to the largest value.
double relative_error(const at::Tensor& actual, const at::Tensor& expected) {
  return ((actual - expected).abs().max() / expected.abs().max()).item<double>();
}

class ResnetTransformers : public ::testing::Test {
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
    const std::string script = read(TWOBP_SOURCE_DIR "/tests/train/resnet_oracle.py");
    PythonProcess python("resnet_oracle.py", script, {command, folder_->path("")}, /*timeout=*/300);
    return python.read_line();
  }
  static std::string path(const std::string& name) { return folder_->path(name); }
  static json facts(const std::string& folder) { return json::parse(read(path(folder + "/facts.json"))); }

  static Config config_of(const std::string& name, int stages) {
    Config config = load_config(
        "", {"model.from=" + path(name + "/model"), "data.arrays=" + path(name + "/data"), "data.held_out=0",
             "data.shuffle=false", "optimizer.type=sgd", "optimizer.weight_decay=0",
             "optimizer.schedule=constant", "pipeline.micro_batches=2", "pipeline.micro_batch_size=6",
             "pipeline.pin=false", concat("pipeline.stages=", stages)});
    config.optimizer.lr = facts(name).at("lr").get<double>();
    return config;
  }

 private:
  static test::TempFolder* folder_;
  static std::string made_;
};

test::TempFolder* ResnetTransformers::folder_ = nullptr;
std::string ResnetTransformers::made_;

// In evaluation: with the running statistics of the files.
TEST_F(ResnetTransformers, LogitsAreItsOwn) {
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
    load_weights(parameters, ModelWeights(config.model.from, architecture("resnet").names));
    const DataSplit data = open_data(config.data, config.model, 1);
    std::vector<int64_t> all(12);
    std::iota(all.begin(), all.end(), 0);
    const Fields fields = data.train->read(all, kEvaluation);
    Context context;
    context.fields = &fields;
    context.training = false;
    context.generating = true;  // the head gives logits
    std::vector<Saved> saved(layers.size());
    Values x = {fields.at("pixel_values")};
    for (size_t i = 0; i < layers.size(); ++i) x = layers[i]->forward(std::move(x), context, saved[i]);
    const SafetensorsFile expected(path(name + "/logits.safetensors"));
    EXPECT_LT(relative_error(x[0], expected.tensor("logits")), kTolerance) << name;
  }
}

TEST_F(ResnetTransformers, LossAStepOfSgdAndRunningStatisticsAreItsOwn) {
  for (const std::string& name : kCases) {
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile after(path(name + "/after.safetensors"));
    const auto loss = facts(name).at("loss").get<double>();
    for (const int stages : {1, 2, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Trainer trainer(config_of(name, stages));
      const auto loaded = copies_by_name(trainer.weights());
      ASSERT_EQ(loaded.size(), before.names().size());
      for (const auto& [part, value] : loaded) EXPECT_TRUE(same_bits(value, before.tensor(part))) << part;
      EXPECT_NEAR(trainer.step().loss, loss, kTolerance * loss);
      for (const auto& [part, value] : copies_by_name(trainer.weights())) {
        const at::Tensor expected = after.tensor(part);
        if (part.ends_with("num_batches_tracked")) {
          EXPECT_EQ(value.item<int64_t>(), expected.item<int64_t>()) << part;
          EXPECT_EQ(value.item<int64_t>(), 11 + 2) << part;
          continue;
        }
        EXPECT_LT(relative_error(value, expected), kTolerance) << part;
        const at::Tensor step = expected - before.tensor(part);
        // The difference of two weights is exact to the last bit of each.
        const double last_bit = 0x1p-23 * expected.abs().max().item<double>();
        const double largest = step.abs().max().item<double>();
        EXPECT_GT(largest, 100 * last_bit) << part;
        EXPECT_LT((value - expected).abs().max().item<double>(), 1e-3 * largest + 2 * last_bit) << part;
      }
    }
  }
}

TEST_F(ResnetTransformers, LoadsWhatIsSaved) {
  std::map<std::string, std::map<std::string, at::Tensor>> expected;
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 2);
    Trainer trainer(config);
    save_model(path(name + "/saved"), config.model, 1, trainer.weights());
    trainer.step();
    save_model(path(name + "/saved-trained"), config.model, 1, trainer.weights(), {.max_shard_bytes = 9000});
    expected[name] = copies_by_name(trainer.weights());
  }
  ASSERT_EQ(oracle("check"), "ok");
  for (const std::string& name : kCases) {
    SCOPED_TRACE(name);
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile saved(path(name + "/saved/weights.safetensors"));
    const SafetensorsFile trained(path(name + "/saved-trained/weights.safetensors"));
    EXPECT_EQ(saved.names(), before.names());
    EXPECT_EQ(trained.names(), before.names());
    for (const std::string& part : before.names()) {
      EXPECT_TRUE(same_bits(saved.tensor(part), before.tensor(part))) << part;
      EXPECT_TRUE(same_bits(trained.tensor(part), expected[name][part])) << part;
    }
    const SafetensorsFile logits(path(name + "/logits.safetensors"));
    const SafetensorsFile again(path(name + "/saved/logits.safetensors"));
    EXPECT_TRUE(same_bits(again.tensor("logits"), logits.tensor("logits")));
  }
}

}  // namespace
}  // namespace twobp
