// Tests sequences in slices. With the same slices, losses, norms and weights are the same to the bit for
// every schedule, policy, split, cap and number of ranks. They equal those of whole sequences within
// rounding.
#include <gtest/gtest.h>

#include "tests/train/training.h"
#include "twobp/models/mamba.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/check_config.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::Outcome;

constexpr int kSteps = 3;
const std::vector<std::vector<int>> kLengths = {{5, 11}, {4, 1, 3, 8}};

Config config_of(const std::vector<int>& split, const std::vector<int>& lengths, int ranks = 0) {
  Config config = test::tiny_config();
  config.train.clip_norm = 0.5;
  config.pipeline.stages = static_cast<int>(split.size());
  config.pipeline.ranks = ranks;
  config.pipeline.split = split;
  config.pipeline.slices = std::max<int>(1, static_cast<int>(lengths.size()));
  config.pipeline.slice_lengths = lengths;
  return config;
}

Outcome train(const Config& config, const std::vector<Batch>& batches, const std::string& schedule,
              P2Policy policy, const MemoryCap& cap = MemoryCap::automatic(),
              P2Batching batching = P2Batching::kLoop) {
  Config with = config;
  with.pipeline.schedule = schedule;
  return test::train(with, batches, {schedule, policy, batching, cap});
}

TEST(Slices, HaveTheSameBitsForEverySchedule) {
  for (const int micro_batches : {1, 3}) {
    const auto batches = test::random_batches(kSteps, micro_batches);
    for (const auto& lengths : kLengths) {
      const Outcome expected = train(config_of({8}, lengths), batches, "gpipe", P2Policy::kOff);
      for (const char* schedule : {"naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"}) {
        for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
          expect_same_bits(expected, train(config_of({3, 2, 3}, lengths), batches, schedule, policy),
                           concat(schedule, ", p2 ", policy_name(policy), ", M ", micro_batches));
        }
      }
      for (const char* schedule : {"zb-h1", "zb-h2"}) {
        expect_same_bits(expected, train(config_of({3, 5}, lengths), batches, schedule, P2Policy::kPlaced),
                         concat(schedule, " placed, M ", micro_batches));
      }
      for (const char* schedule :
           {"zb-v", "v-half", "v-min", "interleaved-1f1b", "interleaved-zb", "looped-bfs"}) {
        for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
          expect_same_bits(expected, train(config_of({2, 2, 1, 3}, lengths, 2), batches, schedule, policy),
                           concat(schedule, ", p2 ", policy_name(policy), ", M ", micro_batches));
        }
      }
      for (const int64_t cap : {0, 1, 20000}) {
        expect_same_bits(expected, train(config_of({3, 5}, lengths), batches, "1f1b", P2Policy::kFill, cap),
                         concat("cap ", cap));
      }
    }
  }
}

// A sum over positions is cut in other places, which costs a few roundings of float32.
TEST(Slices, AgreeWithWholeSequences) {
  const auto batches = test::random_batches(kSteps, 2);
  const Outcome whole = train(config_of({3, 5}, {}), batches, "1f1b", P2Policy::kFill);
  for (const auto& lengths : kLengths) {
    const Outcome sliced = train(config_of({3, 5}, lengths), batches, "1f1b", P2Policy::kFill);
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(sliced.losses[step], whole.losses[step], 1e-5 * whole.losses[step]) << step;
      EXPECT_NEAR(sliced.norms[step], whole.norms[step], 1e-4 * whole.norms[step]) << step;
    }
    EXPECT_FALSE(test::same_bits(sliced.norms, whole.norms)) << "nothing was cut";
  }
}

TEST(Slices, WorkWithPaddingAndRecomputation) {
  const auto batches = test::padded(test::random_batches(kSteps, 2));
  const Outcome whole = train(config_of({3, 5}, {}), batches, "1f1b", P2Policy::kFill);
  const Outcome sliced = train(config_of({3, 5}, {5, 11}), batches, "1f1b", P2Policy::kFill);
  EXPECT_NEAR(sliced.losses.back(), whole.losses.back(), 1e-5 * whole.losses.back());
  Config again = config_of({3, 5}, {5, 11});
  again.pipeline.recompute = {"activations"};
  expect_same_bits(sliced, train(again, batches, "1f1b", P2Policy::kFill), "recompute activations");
}

TEST(Slices, WorkWithFrozenLayers) {
  const auto batches = test::random_batches(kSteps, 2);
  const auto frozen = [&](const std::vector<int>& lengths, const std::vector<int>& split) {
    Config config = config_of(split, lengths);
    config.model.freeze = {"model.embed*", "model.layers.0.*"};
    return train(config, batches, "1f1b", P2Policy::kFill);
  };
  const Outcome whole = frozen({}, {3, 5});
  const Outcome sliced = frozen({5, 11}, {3, 5});
  EXPECT_NEAR(sliced.losses.back(), whole.losses.back(), 1e-5 * whole.losses.back());
  expect_same_bits(sliced, frozen({5, 11}, {2, 6}), "another split");
}

TEST(Slices, WorkInMamba) {
  Config config = test::tiny_config();
  MambaOptions mamba;
  mamba.dim = 24;
  mamba.layers = 2;
  mamba.vocab = test::kVocab;
  config.model.type = mamba;
  const auto batches = test::random_batches(kSteps, 2);
  config.pipeline.stages = 2;
  config.pipeline.schedule = "1f1b";
  const Outcome whole = test::train(config, batches, {"1f1b", P2Policy::kFill});
  config.pipeline.slices = 4;
  config.pipeline.slice_lengths = {2, 7, 1, 6};
  const Outcome sliced = test::train(config, batches, {"1f1b", P2Policy::kFill});
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(sliced.losses[step], whole.losses[step], 1e-5 * whole.losses[step]) << step;
    EXPECT_NEAR(sliced.norms[step], whole.norms[step], 1e-4 * whole.norms[step]) << step;
  }
  config.pipeline.stages = 1;
  expect_same_bits(sliced, test::train(config, batches, {"1f1b", P2Policy::kOff}), "one stage");
}

// The slices are cut by measured cost. Whatever the cuts are, they cover the sequence in whole blocks.
TEST(Slices, AreCutByCost) {
  Config config = config_of({3, 5}, {});
  config.data.sequence = 64;
  config.pipeline.slices = 3;
  config.pipeline.schedule = "1f1b";
  Trainer trainer(config);
  const Cuts& cuts = trainer.pipeline().cuts();
  ASSERT_EQ(cuts.size(), 4U);
  EXPECT_EQ(cuts.front(), 0);
  EXPECT_EQ(cuts.back(), 64);
  for (size_t i = 1; i + 1 < cuts.size(); ++i) {
    EXPECT_EQ(cuts[i] % kSliceBlock, 0);
    EXPECT_GT(cuts[i], cuts[i - 1]);
  }
  trainer.step();
}

TEST(Slices, RefuseBadInput) {
  const auto refused = [](const std::function<void(Config&)>& change, const std::vector<std::string>& parts) {
    Config config = config_of({3, 5}, {});
    config.pipeline.schedule = "1f1b";
    change(config);
    test::expect_error(
        [&] {
          check_config(config);
          Trainer trainer(config);
        },
        parts);
  };
  refused([](Config& c) { c.pipeline.slices = 3; },
          {"pipeline.slices is 3", "16 positions", "use at most 2"});
  refused(
      [](Config& c) {
        c.pipeline.slices = 2;
        c.pipeline.slice_lengths = {8};
      },
      {"pipeline.slice_lengths lists 1 slices", "pipeline.slices is 2"});
  refused(
      [](Config& c) {
        c.pipeline.slices = 2;
        c.pipeline.slice_lengths = {8, 9};
      },
      {"add up to 17", "the sequences have 16"});
  refused(
      [](Config& c) {
        c.pipeline.slices = 2;
        c.pipeline.recompute = {"both"};
      },
      {"pipeline.slices is 2", "recompute has \"both\""});
  refused(
      [](Config& c) {
        c.pipeline.slices = 2;
        c.pipeline.schedule = "auto";
      },
      {"pipeline.slices is 2", "\"auto\"", "no slices"});
  refused(
      [](Config& c) {
        c.pipeline.slices = 2;
        c.model.type = ModelOptions("bert");
      },
      {"pipeline.slices is 2", "\"bert\""});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
