// Tests the learning rate at each end of the warm-up and of the decay, and at points between them that were computed by
// hand.
#include <gtest/gtest.h>

#include "helpers.h"
#include "twobp/train/update/rates.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

OptimizerConfig make(const std::string& schedule, int64_t warmup) {
  OptimizerConfig config;
  config.lr = 0.1;
  config.min_lr = 0.02;
  config.warmup = warmup;
  config.schedule = schedule;
  return config;
}

TEST(LearningRate, WarmUpRisesLinearlyAndIsNeverZero) {
  for (const char* schedule : {"constant", "linear", "cosine", "wsd", "inverse_sqrt"}) {
    const auto config = make(schedule, 4);
    for (int64_t step = 0; step < 4; ++step) {
      EXPECT_DOUBLE_EQ(learning_rate(config, step, 100), 0.1 * static_cast<double>(step + 1) / 5) << schedule;
    }
    EXPECT_DOUBLE_EQ(learning_rate(config, 4, 100), 0.1) << schedule;
  }
}

TEST(LearningRate, WithoutWarmUpStartsAtLr) {
  for (const char* schedule : {"constant", "linear", "cosine", "wsd", "inverse_sqrt"}) {
    EXPECT_DOUBLE_EQ(learning_rate(make(schedule, 0), 0, 10), 0.1) << schedule;
  }
}

TEST(LearningRate, ConstantStays) {
  EXPECT_DOUBLE_EQ(learning_rate(make("constant", 2), 9, 10), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(make("constant", 2), 1000, 10), 0.1);
}

TEST(LearningRate, LinearFallsToMinLr) {
  const auto config = make("linear", 2);
  EXPECT_DOUBLE_EQ(learning_rate(config, 4, 10), 0.1 - 0.08 * 0.25);
  EXPECT_DOUBLE_EQ(learning_rate(config, 6, 10), 0.06);
  EXPECT_DOUBLE_EQ(learning_rate(config, 9, 10), 0.1 - 0.08 * 7 / 8);
  EXPECT_DOUBLE_EQ(learning_rate(config, 10, 10), 0.02);
  EXPECT_DOUBLE_EQ(learning_rate(config, 25, 10), 0.02);
}

TEST(LearningRate, CosineFallsToMinLr) {
  const auto config = make("cosine", 2);
  EXPECT_NEAR(learning_rate(config, 4, 10), 0.02 + 0.08 * (1 + 0.70710678118654752) / 2, 1e-15);
  EXPECT_NEAR(learning_rate(config, 6, 10), 0.06, 1e-15);
  EXPECT_NEAR(learning_rate(config, 10, 10), 0.02, 1e-15);
  EXPECT_NEAR(learning_rate(config, 25, 10), 0.02, 1e-15);
}

TEST(LearningRate, WsdIsStableAndFallsAtTheEnd) {
  auto config = make("wsd", 2);
  config.decay = 4;
  EXPECT_DOUBLE_EQ(learning_rate(config, 15, 20), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(config, 16, 20), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(config, 17, 20), 0.1 - 0.08 / 4);
  EXPECT_DOUBLE_EQ(learning_rate(config, 20, 20), 0.02);
  EXPECT_DOUBLE_EQ(learning_rate(config, 25, 20), 0.02);
  config.decay = 0;  // the default is a tenth
  EXPECT_DOUBLE_EQ(learning_rate(config, 18, 20), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(config, 19, 20), 0.06);
  config.decay = 100;  // longer than the run: the decay begins after the warm-up
  EXPECT_DOUBLE_EQ(learning_rate(config, 2, 20), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(config, 11, 20), 0.06);
}

TEST(LearningRate, InverseSqrtFallsFromTheWarmUpOn) {
  EXPECT_DOUBLE_EQ(learning_rate(make("inverse_sqrt", 4), 16, 10), 0.05);  // 4 / (4 + 12) is a quarter
  EXPECT_DOUBLE_EQ(learning_rate(make("inverse_sqrt", 4), 400, 10), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(make("inverse_sqrt", 0), 30000, 10), 0.05);
}

// This is a short trial run of a configuration with a long warm-up, and the step after its end.
TEST(LearningRate, WarmUpMayBeLongerThanTheRun) {
  EXPECT_DOUBLE_EQ(learning_rate(make("cosine", 100), 9, 10), 0.1 * 10 / 101);
  EXPECT_DOUBLE_EQ(learning_rate(make("linear", 10), 10, 10), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(make("linear", 10), 11, 10), 0.02);
}

TEST(LearningRate, RefusesBadInput) {
  expect_error([] { learning_rate(make("cosin", 0), 0, 10); }, {"optimizer.schedule", "\"cosin\"", "\"cosine\""});
  expect_error([] { learning_rate(make("cosine", 0), -1, 10); }, {"step -1"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
