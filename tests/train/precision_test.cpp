// Tests training in reduced precision. Losses stay close to float32's, and float16 skips the steps that overflow.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/train/bert_batches.h"
#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/update/rates.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::random_batches;
using test::tiny_config;

Config config_of(const std::string& precision, int stages = 1) {
  Config config = tiny_config();
  config.train.precision = precision;
  config.pipeline.stages = stages;
  return config;
}

class Reduced : public ::testing::TestWithParam<std::string> {};

TEST_P(Reduced, LossesStayCloseToFloat32) {
  const auto batches = random_batches(20, 2);
  const Variant variant{"1f1b", P2Policy::kFill};
  Config exact_config = config_of("fp32");
  exact_config.optimizer.lr = 1e-3;
  Config config = config_of(GetParam());
  config.optimizer.lr = 1e-3;
  config.train.loss_scale = 1024;
  const auto exact = test::train(exact_config, batches, variant);
  const auto reduced = test::train(config, batches, variant);
  EXPECT_FALSE(test::same_bits(exact.losses, reduced.losses)) << "it computed in float32";
  for (size_t i = 0; i < exact.losses.size(); ++i) {
    EXPECT_NEAR(reduced.losses[i], exact.losses[i], 0.02 * exact.losses[i]) << "step " << i;
    EXPECT_NEAR(reduced.norms[i], exact.norms[i], 0.1 * exact.norms[i]) << "step " << i;
  }
}

TEST_P(Reduced, LossesOfOtherModelsStayCloseToFloat32) {
  for (const bool encoder : {true, false}) {
    Config config = config_of("fp32", 2);
    encoder ? void(test::make_bert(config, test::kSequence, 0.2)) : void(test::make_mamba(config));
    const auto batches = encoder ? test::bert_batches(3, 2) : random_batches(3, 2);
    const double exact = test::train(config, batches, {"1f1b", P2Policy::kFill}).losses.back();
    config.train.precision = GetParam();
    EXPECT_NEAR(test::train(config, batches, {"1f1b", P2Policy::kFill}).losses.back(), exact, 0.02 * exact) << encoder;
  }
}

TEST_P(Reduced, MastersAndStateAreFloat32) {
  Trainer trainer(config_of(GetParam()));
  test::train(trainer, random_batches(1, 2), {"1f1b", P2Policy::kFill});
  for (const Parameter* weight : trainer.weights()) {
    EXPECT_EQ(weight->master.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(weight->value, weight->master.to(weight->value.scalar_type()))) << weight->name();
  }
}

INSTANTIATE_TEST_SUITE_P(All, Reduced, ::testing::Values("bf16", "fp16"), [](const auto& info) { return info.param; });

TEST(LossScale, OverflowSkipsTheStepAndHalvesTheScale) {
  for (const int stages : {1, 2}) {
    Config config = config_of("fp16", stages);
    config.train.loss_scale = 0x1p30;
    Trainer trainer(config);
    const auto before = test::copies_of(trainer.weights());
    const auto batches = random_batches(30, 2);
    const StepResult first = trainer.step(batches[0], {"1f1b", P2Policy::kFill});
    EXPECT_TRUE(first.skipped);
    EXPECT_TRUE(std::isfinite(first.loss));
    const auto after = test::copies_of(trainer.weights());
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(test::same_bits(before[i], after[i]));
    int skipped = 1;
    StepResult last;
    for (size_t i = 1; i < batches.size(); ++i) {
      last = trainer.step(batches[i], {"1f1b", P2Policy::kFill});
      skipped += last.skipped ? 1 : 0;
    }
    EXPECT_LT(skipped, 29);
    EXPECT_FALSE(last.skipped);
    EXPECT_FALSE(test::same_bits(before[0], trainer.weights()[0]->value));
  }
}

TEST(LossScale, DoesNotChangeTheNorm) {
  const auto batches = random_batches(1, 2);
  Config small = config_of("fp16");
  small.train.loss_scale = 1024;
  Config large = small;
  large.train.loss_scale = 4096;
  const Variant variant{"1f1b", P2Policy::kFill};
  const auto a = test::train(small, batches, variant);
  const auto b = test::train(large, batches, variant);
  EXPECT_NEAR(a.norms[0], b.norms[0], 0.01 * a.norms[0]);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
