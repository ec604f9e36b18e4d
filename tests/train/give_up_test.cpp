// Tests a stop in the middle of a step or an evaluation. The work ends within a micro-batch, and the trainer returns to
// its previous state, to the bit.
#include <atomic>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/resnet_training.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::Outcome;
using test::tiny_config;

constexpr int kSteps = 4;

Config config_of(const std::string& schedule, const std::string& p2) {
  Config config = tiny_config();
  config.data.held_out = 7.0 / 1024;
  config.train.steps = kSteps;
  config.train.clip_norm = 0.5;
  config.pipeline.schedule = schedule;
  config.pipeline.p2 = p2;
  config.pipeline.micro_batches = 4;
  config.pipeline.ranks = 2;
  config.pipeline.stages = 0;
  return config;
}

// Before step 3, the run gets a stop request when a rank checks for the n-th time. `given_up` counts the abandoned
// steps.
Outcome run(const Config& config, const std::vector<int>& moments, int* given_up = nullptr) {
  Trainer trainer(config);
  Outcome outcome;
  std::atomic<int> looks{0};
  const auto add = [&](const StepResult& result) {
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
  };
  for (int i = 0; i < 2; ++i) add(trainer.step());
  for (const int moment : moments) {
    looks = 0;
    trainer.stop_when([&looks, moment] { return ++looks > moment; });
    const TrainingPosition before = trainer.position();
    const StepResult result = trainer.step();
    EXPECT_TRUE(result.stop);
    EXPECT_TRUE(trainer.stopping());
    trainer.stop_when({});
    if (result.given_up) {
      EXPECT_EQ(result.step, trainer.steps_done());
      EXPECT_EQ(trainer.position().step, before.step);
      EXPECT_EQ(trainer.position().batches, before.batches);
      if (given_up) ++*given_up;
    } else {
      add(result);
    }
  }
  while (trainer.steps_done() < kSteps) add(trainer.step());
  EXPECT_TRUE(trainer.evaluate().has_value());
  outcome.weights = test::copies_of(trainer.weights());
  return outcome;
}

TEST(GiveUp, AStepLeavesNoTrace) {
  for (const auto& [schedule, p2] :
       {std::pair{"1f1b", "fill"}, {"1f1b", "off"}, {"gpipe", "end"}, {"zb-v", "placed"}}) {
    const Config config = config_of(schedule, p2);
    const Outcome undisturbed = run(config, {});
    int given_up = 0;
    test::expect_same_bits(undisturbed, run(config, {0, 1, 9, 17, 40}, &given_up), concat(schedule, " ", p2));
    EXPECT_GE(given_up, 3) << schedule;
  }
}

TEST(GiveUp, AnEvaluationLeavesNoTrace) {
  const Config config = config_of("1f1b", "fill");
  Trainer trainer(config);
  const auto expected = trainer.evaluate();
  for (const int moment : {0, 2, 7}) {
    std::atomic<int> looks{0};
    trainer.stop_when([&] { return ++looks > moment; });
    EXPECT_FALSE(trainer.evaluate().has_value());
    EXPECT_TRUE(trainer.stopping());
    EXPECT_LT(looks, moment + 30) << "the rest of the evaluation was skipped";
    trainer.stop_when({});
    EXPECT_EQ(trainer.evaluate(), expected) << "nothing is left of it";
  }
}

// Buffers change in F and are restored.
TEST(GiveUp, AStepRestoresBuffers) {
  Config config = test::tiny_resnet("basic");
  config.train.steps = kSteps;
  config.data.held_out = 7.0 / 1024;
  config.pipeline.stages = 2;
  int given_up = 0;
  test::expect_same_bits(run(config, {}), run(config, {1, 4, 9}, &given_up), "resnet");
  EXPECT_GE(given_up, 2);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
