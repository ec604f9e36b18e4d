// Tests the promise on which the whole design rests. Losses, gradient norms and weights after three steps are the same
// to the bit for every schedule, p2 policy, number of stages and split of the layers, at each number of micro-batches.
// The reference is one stage with standard backpropagation.
#include <tuple>

#include <gtest/gtest.h>

#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::Outcome;
using test::random_batches;
using test::tiny_config;

constexpr int kSteps = 3;

// These are the layers per stage. Some splits are even and some are not, some stages end inside a block, and some have
// one layer.
const std::vector<std::vector<int>> kSplits = {{8}, {4, 4}, {3, 5}, {3, 2, 3}, {1, 2, 1, 3, 1}, {1, 1, 1, 4, 1}};
const std::vector<std::string> kSchedules = {"naive", "gpipe", "1f1b"};
const std::vector<P2Policy> kPolicies = {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill};

Config config_of(bool tied, double clip_norm, const std::vector<int>& split) {
  Config config = tiny_config();
  test::llama_of(config).tied = tied;
  config.train.clip_norm = clip_norm;
  config.pipeline.stages = static_cast<int>(split.size());
  config.pipeline.split = split;
  return config;
}

std::string name_of(const std::vector<int>& split, const Variant& variant) {
  return concat("split ", ::testing::PrintToString(split), ", ", variant.schedule, ", p2 ", policy_name(variant.policy),
                ", cap ", variant.memory_cap);
}

// The parameters are (tied, clipped, micro-batches).
class BitwiseMatrix : public ::testing::TestWithParam<std::tuple<bool, bool, int>> {};

TEST_P(BitwiseMatrix, SameForEveryScheduleAndPolicyAndSplit) {
  const auto [tied, clipped, micro_batches] = GetParam();
  const double clip_norm = clipped ? 0.5 : 0;
  const auto batches = random_batches(kSteps, micro_batches);
  const Outcome expected = test::train(config_of(tied, clip_norm, {test::kLayers}), batches, {"gpipe", P2Policy::kOff});
  if (clipped) {
    for (const double norm : expected.norms) ASSERT_GT(norm, clip_norm) << "nothing was clipped";
  }
  for (const auto& split : kSplits) {
    for (const auto& schedule : kSchedules) {
      for (const P2Policy policy : kPolicies) {
        const Variant variant{schedule, policy};
        expect_same_bits(expected, test::train(config_of(tied, clip_norm, split), batches, variant),
                         name_of(split, variant));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, BitwiseMatrix,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool(), ::testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return concat(std::get<0>(info.param) ? "Tied" : "Untied",
                                         std::get<1>(info.param) ? "Clipped" : "Unclipped", "M",
                                         std::get<2>(info.param));
                         });

// The reference above is itself a run of this library. autograd_test shows that it learns the same as autograd.
TEST(BitwiseReference, DependsOnItsInputs) {
  const auto batches = random_batches(kSteps, 2);
  const Variant variant{"gpipe", P2Policy::kOff};
  const Outcome plain = test::train(config_of(false, 0, {8}), batches, variant);
  EXPECT_FALSE(test::same_bits(plain.losses, test::train(config_of(true, 0, {8}), batches, variant).losses));
  EXPECT_FALSE(test::same_bits(plain.losses, test::train(config_of(false, 0.5, {8}), batches, variant).losses));
  EXPECT_FALSE(
      test::same_bits(plain.losses, test::train(config_of(false, 0, {8}), random_batches(kSteps, 3), variant).losses));
}

TEST(Bitwise, SameUnderAnyMemoryCap) {
  const auto batches = random_batches(kSteps, 4);
  const Outcome expected = test::train(config_of(true, 0.5, {8}), batches, {"gpipe", P2Policy::kOff});
  for (const auto& schedule : kSchedules) {
    for (const P2Policy policy : kPolicies) {
      for (const MemoryCap& cap : {MemoryCap(0), MemoryCap(1), MemoryCap(100'000), MemoryCap::automatic()}) {
        const std::vector<int> split = {3, 2, 3};
        const Variant variant{schedule, policy, P2Batching::kLoop, cap};
        expect_same_bits(expected, test::train(config_of(true, 0.5, split), batches, variant), name_of(split, variant));
      }
    }
  }
}

TEST(Bitwise, SameWithPadding) {
  const auto plain = random_batches(kSteps, 3);
  const auto batches = test::padded(plain);
  const Variant standard{"gpipe", P2Policy::kOff};
  const Outcome expected = test::train(config_of(true, 0.5, {8}), batches, standard);
  EXPECT_FALSE(test::same_bits(expected.losses, test::train(config_of(true, 0.5, {8}), plain, standard).losses));
  for (const auto& split : kSplits) {
    for (const P2Policy policy : kPolicies) {
      const Variant variant{"1f1b", policy};
      expect_same_bits(expected, test::train(config_of(true, 0.5, split), batches, variant), name_of(split, variant));
    }
  }
}

// A run may change these settings from one step to the next.
TEST(Bitwise, SameWhenThePlanChangesBetweenSteps) {
  const auto batches = random_batches(4, 3);
  const Outcome expected = test::train(config_of(false, 0.5, {8}), batches, {"gpipe", P2Policy::kOff});
  Trainer trainer(config_of(false, 0.5, {3, 2, 3}));
  Outcome actual;
  const std::vector<Variant> variants = {{"1f1b", P2Policy::kFill},
                                         {"naive", P2Policy::kOff},
                                         {"gpipe", P2Policy::kEnd, P2Batching::kLoop, 1},
                                         {"1f1b", P2Policy::kCooldown}};
  for (size_t i = 0; i < batches.size(); ++i) {
    const StepResult result = trainer.step(batches[i], variants[i]);
    actual.losses.push_back(result.loss);
    actual.norms.push_back(result.grad_norm);
  }
  actual.weights = test::copies_of(trainer.weights());
  expect_same_bits(expected, actual, "changing plans");
}

// A split by measured cost depends on the clock, but the result must not.
TEST(Bitwise, SameForAMeasuredSplit) {
  const auto batches = random_batches(kSteps, 2);
  const Outcome expected = test::train(config_of(false, 0, {8}), batches, {"gpipe", P2Policy::kOff});
  for (const int stages : {2, 3, 5, 8}) {
    Config config = tiny_config();
    config.pipeline.stages = stages;
    expect_same_bits(expected, test::train(config, batches, {"1f1b", P2Policy::kFill}), concat(stages, " stages"));
  }
}

// The last batch of an epoch has fewer micro-batches, and its last micro-batch has fewer samples.
TEST(Bitwise, SameForASmallerLastBatch) {
  std::vector<Batch> batches = {test::random_batch(4, 2, 2, 1), test::random_batch(2, 2, 1, 2),
                                test::random_batch(4, 2, 2, 3), test::random_batch(1, 1, 1, 4),
                                test::random_batch(4, 2, 1, 5)};
  for (const bool tied : {false, true}) {
    const Outcome expected = test::train(config_of(tied, 0.5, {8}), batches, {"gpipe", P2Policy::kOff});
    for (const auto& split : kSplits) {
      for (const auto& schedule : kSchedules) {
        for (const P2Policy policy : kPolicies) {
          const Variant variant{schedule, policy};
          expect_same_bits(expected, test::train(config_of(tied, 0.5, split), batches, variant),
                           name_of(split, variant));
        }
      }
    }
  }
}

// Both sides use two threads a rank.
TEST(Bitwise, SameWithSeveralThreadsARank) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not see the barriers of the OpenMP inside LibTorch";
#endif
  const auto batches = random_batches(kSteps, 3);
  Config one = config_of(true, 0.5, {8});
  Config three = config_of(true, 0.5, {3, 2, 3});
  one.pipeline.threads = three.pipeline.threads = 2;
  const Outcome expected = test::train(one, batches, {"gpipe", P2Policy::kOff});
  for (const P2Policy policy : kPolicies) {
    const Variant variant{"1f1b", policy};
    expect_same_bits(expected, test::train(three, batches, variant), name_of({3, 2, 3}, variant));
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
