// Tests that evaluation between steps does not change training, to the bit. It leaves no gradient, saved tensor, ring
// or message for the next step. Also tests training through the loader, with the smaller last batch of an epoch.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/resnet_training.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::Outcome;
using test::TempFolder;
using test::tiny_config;

Config config_of(const std::string& p2, const std::string& batching, std::vector<int> split) {
  Config config = tiny_config();
  config.data.held_out = 7.0 / 1024;  // 7 of the 1024 synthetic samples
  config.train.clip_norm = 0.5;
  config.pipeline.micro_batches = 3;
  config.pipeline.p2 = p2;
  config.pipeline.p2_batching = batching;
  config.pipeline.stages = static_cast<int>(split.size());
  config.pipeline.split = std::move(split);
  return config;
}

Outcome run(const Config& config, int steps, bool evaluate) {
  Trainer trainer(config);
  Outcome outcome;
  for (int i = 0; i < steps; ++i) {
    if (evaluate) {
      const auto loss = trainer.evaluate();
      EXPECT_TRUE(loss.has_value());
      EXPECT_EQ(loss, trainer.evaluate()) << "evaluating twice gives the same";
    }
    const StepResult result = trainer.step();
    EXPECT_EQ(result.step, i + 1);
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
  }
  outcome.weights = test::copies_of(trainer.weights());
  return outcome;
}

TEST(Evaluation, LeavesTrainingBitwiseUnchanged) {
  for (const char* p2 : {"off", "end", "cooldown", "fill"}) {
    for (const std::vector<int>& split : {std::vector<int>{8}, {3, 2, 3}}) {
      const Config config = config_of(p2, "loop", split);
      test::expect_same_bits(run(config, 3, false), run(config, 3, true),
                             concat(p2, " ", ::testing::PrintToString(split)));
    }
  }
}

// No mask is drawn in an evaluation, and no running statistic is changed.
TEST(Evaluation, LeavesOtherModelsBitwiseUnchanged) {
  Config bert = config_of("fill", "loop", {3, 5});
  test::make_bert(bert, test::kSequence, 0.2).tied = true;
  Config resnet = test::tiny_resnet("basic");
  resnet.data.held_out = 0.01;
  resnet.pipeline.stages = 2;
  for (const Config& config : {bert, resnet})
    test::expect_same_bits(run(config, 3, false), run(config, 3, true), config.model.type.name());
}

// With p2 `end`, the micro-batches that are concatenated are fixed, so the bits are too.
TEST(Evaluation, DoesNotChangeConcatenation) {
  const Config config = config_of("end", "concat", {3, 5});
  test::expect_same_bits(run(config, 3, false), run(config, 3, true), "concat");
}

TEST(Evaluation, IsTheSameForAnySplit) {
  std::vector<Evaluation> results;
  for (const std::vector<int>& split : {std::vector<int>{8}, {3, 5}, {1, 2, 1, 3, 1}}) {
    Trainer trainer(config_of("fill", "loop", split));
    results.push_back(trainer.evaluate().value());
    trainer.step();
    results.push_back(trainer.evaluate().value());
  }
  ASSERT_EQ(results.size(), 6U);
  EXPECT_NE(results[0].loss, results[1].loss) << "a step changes the weights";
  EXPECT_EQ(results[0], results[2]);
  EXPECT_EQ(results[0], results[4]);
  EXPECT_EQ(results[1], results[3]);
  EXPECT_EQ(results[1], results[5]);
}

TEST(Evaluation, ReadsAtMostEvalBatches) {
  Config config = config_of("fill", "loop", {3, 5});
  config.pipeline.micro_batches = 1;  // batches of 2 samples: 2 + 2 + 2 + 1
  config.train.eval_batches = 1;
  const double one = Trainer(config).evaluate().value().loss;
  config.train.eval_batches = 4;
  const double four = Trainer(config).evaluate().value().loss;
  config.train.eval_batches = 0;
  const double all = Trainer(config).evaluate().value().loss;
  EXPECT_NE(one, all);
  EXPECT_EQ(four, all);
}

TEST(Evaluation, GivesNothingWithoutHeldOutData) {
  Config config = tiny_config();
  EXPECT_FALSE(Trainer(config).evaluate().has_value());
}

// There are nine samples in batches of 3 x 2. The second batch of each epoch has 2 + 1 samples.
TEST(Epochs, MayEndWithASmallerBatch) {
  TempFolder folder;
  std::vector<int32_t> ids;
  SplitMix64 random(3);
  for (int i = 0; i < 9 * test::kSequence; ++i) ids.push_back(static_cast<int32_t>(bounded(random, test::kVocab)));
  const std::string shape = concat("(9, ", test::kSequence, ")");
  folder.write("input_ids.npy", test::npy_file("<i4", shape, ids));
  folder.write("labels.npy", test::npy_file("<i4", shape, ids));
  Outcome expected;
  for (const std::vector<int>& split : {std::vector<int>{8}, {3, 5}, {3, 2, 3}, {1, 2, 1, 3, 1}}) {
    for (const char* p2 : {"off", "end", "cooldown", "fill"}) {
      Config config = config_of(p2, "loop", split);
      config.data.synthetic = "";
      config.data.arrays = folder.path("");
      config.data.held_out = 0;
      const Outcome actual = run(config, 4, false);
      if (expected.losses.empty()) {
        expected = actual;
        Trainer trainer(config);
        std::vector<int64_t> tokens;
        for (int i = 0; i < 4; ++i) tokens.push_back(trainer.step().tokens);
        EXPECT_EQ(tokens, (std::vector<int64_t>{6 * 16, 3 * 16, 6 * 16, 3 * 16}));
      }
      test::expect_same_bits(expected, actual, concat(p2, " ", ::testing::PrintToString(split)));
    }
  }
}

// A batch without counted labels cannot be trained on. It gives an error instead of 0 / 0.
TEST(Trainer, RefusesABatchWithoutTargets) {
  Trainer trainer(tiny_config());
  Batch batch = test::random_batch(2, 2, 2, 1);
  for (Fields& fields : batch.micro_batches) fields.at("labels").fill_(-100);
  batch.targets = 0;
  test::expect_error([&] { trainer.step(batch, {"1f1b"}); }, {"no label that counts"});
}

TEST(Evaluation, RefusesALossThatIsNotFinite) {
  Trainer trainer(config_of("off", "loop", {8}));
  trainer.weights().front()->value.fill_(NAN);
  test::expect_error([&] { trainer.evaluate(); }, {"held-out loss", "not finite"});
}

// A model that cannot be saved leaves the trainer as it was.
TEST(Averages, GiveWayToTheWeightsAgain) {
  Config config = test::tiny_config();
  config.optimizer.average = 0.5;
  Trainer trainer(config);
  trainer.step();
  trainer.step();  // the mean of one step is its weights
  const auto weights = test::copies_of(trainer.weights());
  const auto are_the_weights = [&] {
    const auto now = test::copies_of(trainer.weights());
    return std::equal(now.begin(), now.end(), weights.begin(), weights.end(),
                      [](const at::Tensor& a, const at::Tensor& b) { return test::same_bits(a, b); });
  };
  test::expect_error(
      [&] {
        trainer.with_averages([&] {
          EXPECT_FALSE(are_the_weights());
          fail("the disk is full");
        });
      },
      {"the disk is full"});
  EXPECT_TRUE(are_the_weights());
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
