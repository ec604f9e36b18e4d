// A Mamba against transformers itself (its CPU path): models that it saved give its logits and loss here, the
// weights after one step of SGD are its own, whatever the stages, and what is saved here it loads again, to
// the bit. Skipped where Python has no transformers.
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
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

class MambaTransformers : public ::testing::Test {
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
    const std::string script = read(TWOBP_SOURCE_DIR "/tests/train/mamba_oracle.py");
    PythonProcess python("mamba_oracle.py", script, {command, folder_->path("")}, /*timeout=*/300);
    return python.read_line();
  }
  static std::string path(const std::string& name) { return folder_->path(name); }
  static json facts(const std::string& folder) { return json::parse(read(path(folder + "/facts.json"))); }

  static Config config_of(const std::string& name, int stages) {
    Config config = load_config(
        "", {"model.from=" + path(name + "/model"), "data.arrays=" + path(name + "/data"), "data.sequence=39",
             "data.held_out=0", "data.shuffle=false", "optimizer.type=sgd", "optimizer.weight_decay=0",
             "optimizer.schedule=constant", "pipeline.micro_batches=2", "pipeline.micro_batch_size=2",
             "pipeline.pin=false", concat("pipeline.stages=", stages)});
    config.optimizer.lr = facts(name).at("lr").get<double>();
    return config;
  }

  // What transformers has of a model, against the trainer's: all of it, to the bit.
  static void expect_same(const std::vector<Parameter*>& weights, const SafetensorsFile& expected) {
    size_t count = 0;
    for (const Parameter* weight : weights) {
      for (const auto& [part, value] : weight->parts_of(weight->master)) {
        EXPECT_TRUE(same_bits(value, expected.tensor(part))) << part;
        ++count;
      }
    }
    EXPECT_EQ(count, expected.names().size());
  }

 private:
  static test::TempFolder* folder_;
  static std::string made_;
};

test::TempFolder* MambaTransformers::folder_ = nullptr;
std::string MambaTransformers::made_;

TEST_F(MambaTransformers, LogitsAreItsOwn) {
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 1);
    EXPECT_EQ(config.model.type, "mamba");
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
    context.capacity = 39;
    std::vector<Saved> saved(layers.size());
    Values x;
    for (size_t i = 0; i < layers.size(); ++i) x = layers[i]->forward(std::move(x), context, saved[i]);
    const SafetensorsFile expected(path(name + "/logits.safetensors"));
    EXPECT_LT(relative_error(x[0], expected.tensor("logits")), kTolerance) << name;
  }
}

TEST_F(MambaTransformers, LossAndAStepOfSgdAreItsOwn) {
  for (const std::string& name : kCases) {
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile after(path(name + "/after.safetensors"));
    const auto loss = facts(name).at("loss").get<double>();
    for (const int stages : {1, 2, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Trainer trainer(config_of(name, stages));
      expect_same(trainer.weights(), before);
      EXPECT_NEAR(trainer.step().loss, loss, kTolerance * loss);
      for (const Parameter* weight : trainer.weights()) {
        for (const auto& [part, value] : weight->parts_of(weight->master)) {
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
}

TEST_F(MambaTransformers, LoadsWhatIsSaved) {
  std::map<std::string, std::vector<at::Tensor>> trained;
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 2);
    Trainer trainer(config);
    const auto save = [&](const std::string& to, const SaveModelOptions& options) {
      save_model(path(name + "/" + to), config.model, config.data.sequence, trainer.weights(), options);
    };
    save("saved", {});
    trainer.step();
    save("saved-trained", {});
    // Loaded here again.
    Config again = config;
    again.model.from = path(name + "/saved-trained");
    again.pipeline.stages = 3;
    Trainer reloaded(again);
    for (size_t i = 0; i < trainer.weights().size(); ++i) {
      EXPECT_TRUE(same_bits(reloaded.weights()[i]->master, trainer.weights()[i]->master))
          << trainer.weights()[i]->name();
    }
    for (const Parameter* weight : trainer.weights()) trained[name].push_back(weight->master.clone());
  }
  ASSERT_EQ(oracle("check"), "ok");
  for (const std::string& name : kCases) {
    SCOPED_TRACE(name);
    Trainer trainer(config_of(name, 1));
    expect_same(trainer.weights(), SafetensorsFile(path(name + "/saved/weights.safetensors")));
    const SafetensorsFile logits(path(name + "/logits.safetensors"));
    const SafetensorsFile saved_logits(path(name + "/saved/logits.safetensors"));
    EXPECT_LT(relative_error(saved_logits.tensor("logits"), logits.tensor("logits")), 1e-6)
        << "a setting was lost on the way";
    const SafetensorsFile after(path(name + "/saved-trained/weights.safetensors"));
    for (size_t i = 0; i < trained[name].size(); ++i) {
      for (const auto& [part, value] : trainer.weights()[i]->parts_of(trained[name][i])) {
        EXPECT_TRUE(same_bits(value, after.tensor(part))) << part;
      }
    }
  }
}

}  // namespace
}  // namespace twobp
