// Tests a ResNet against transformers itself. Models that transformers saved give its logits and loss here, and its
// weights and running statistics after one step of SGD, for any number of stages. transformers loads the models that
// are saved here, to the bit. The tests are skipped if Python has no transformers.
#include <numeric>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/resnet_training.h"
#include "tests/train/transformers_fixture.h"
#include "twobp/train/weights/save_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::copies_by_name;
using test::relative_error;
using test::same_bits;

const std::vector<std::string> kCases = {"bottleneck", "basic", "deep"};

class ResnetTransformers : public test::TransformersTest {
 protected:
  static void SetUpTestSuite() { make_models("resnet_oracle"); }
  static Config config_of(const std::string& name, int stages) {
    return sgd_config(name, stages, {"pipeline.micro_batch_size=6"});
  }
};

// Evaluation uses the running statistics of the files.
TEST_F(ResnetTransformers, LogitsAreThoseOfTransformers) {
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 1);
    std::vector<int64_t> all(12);
    std::iota(all.begin(), all.end(), 0);
    const Fields fields = samples(config, all, kEvaluation);
    const at::Tensor actual = logits(config, fields, {fields.at("pixel_values")});
    EXPECT_LT(relative_error(actual, expected_logits(name)), kTolerance) << name;
  }
}

TEST_F(ResnetTransformers, LossAStepOfSgdAndRunningStatisticsAreThoseOfTransformers) {
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

TEST_F(ResnetTransformers, LoadsTheSavedModel) {
  std::map<std::string, std::map<std::string, at::Tensor>> expected;
  for (const std::string& name : kCases) {
    const Config config = config_of(name, 2);
    Trainer trainer(config);
    save_model(path(name + "/saved"), config.model, 1, trainer.weights());
    trainer.step();
    save_model(path(name + "/saved-trained"), config.model, 1, trainer.weights(), {.max_shard_bytes = 9000});
    expected[name] = copies_by_name(trainer.weights());
  }
  ASSERT_EQ(ask_oracle("check"), "ok");
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
}  // namespace twobp::TWOBP_FILE
