// Tests a Mamba against transformers itself (its CPU path). Models that transformers saved give its logits and loss
// here. The weights after one step of SGD are the same for any number of stages. transformers loads the models that are
// saved here, to the bit. The tests are skipped if Python has no transformers.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/transformers_fixture.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/weights/save_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::parts_of;
using test::relative_error;
using test::same_bits;

const std::vector<std::string> kCases = {"tied", "untied"};

class MambaTransformers : public test::TransformersTest {
 protected:
  static void SetUpTestSuite() { make_models("mamba_oracle"); }
  static Config config_of(const std::string& name, int stages) {
    return sgd_config(name, stages, {"data.sequence=39", "pipeline.micro_batch_size=2"});
  }

  // Compares all weights of the model in transformers with the trainer's, to the bit.
  static void expect_same(const std::vector<Parameter*>& weights, const SafetensorsFile& expected) {
    const auto parts = parts_of(weights);
    expect_same_parts(parts, expected);
    EXPECT_EQ(parts.size(), expected.names().size());
  }
};

TEST_F(MambaTransformers, LogitsAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 1);
    EXPECT_EQ(config.model.type.name(), "mamba");
    const at::Tensor actual = logits(config, samples(config, {0, 1, 2, 3}, 0));
    EXPECT_LT(relative_error(actual, expected_logits(name)), kTolerance) << name;
  }
}

TEST_F(MambaTransformers, LossAndAStepOfSgdAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
    const SafetensorsFile before(path(name + "/before.safetensors"));
    const SafetensorsFile after(path(name + "/after.safetensors"));
    const auto loss = facts(name).at("loss").get<double>();
    for (const int stages : {1, 2, 3}) {
      SCOPED_TRACE(concat(name, ", stages ", stages));
      Trainer trainer(config_of(name, stages));
      expect_same(trainer.weights(), before);
      EXPECT_NEAR(trainer.step().loss, loss, kTolerance * loss);
      for (const auto& [part, value] : parts_of(trainer.weights())) {
        expect_same_step(part, value, before.tensor(part), after.tensor(part));
      }
    }
  }
}

TEST_F(MambaTransformers, LoadsTheSavedModel) {
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
    // Our program also loads the model again.
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
  ASSERT_EQ(ask_oracle("check"), "ok");
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
}  // namespace twobp::TWOBP_FILE
