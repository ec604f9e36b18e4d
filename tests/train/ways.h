// Ways to train that must give the same bits: schedules, policies of W, cuts of the layers, ranks, caps and
// recomputation.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/train/training.h"
#include "twobp/core/text.h"

namespace twobp::test {

// The first one is the reference: one stage with standard backpropagation.
struct Way {
  std::string schedule = "gpipe";
  P2Policy policy = P2Policy::kOff;
  int stages = 1;
  std::vector<int> split{};  // layers of the stages; empty: by their cost
  int ranks = 0;             // 0: a rank for each stage
  MemoryCap cap = MemoryCap::automatic();
  std::vector<std::string> recompute{};
  bool streams = false;  // the gradients
};

using Splits = std::vector<std::vector<int>>;
inline const std::vector<std::string> kPlainSchedules = {"naive", "gpipe", "1f1b"};
inline const std::vector<P2Policy> kAnyPolicies = {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown,
                                                   P2Policy::kFill};

inline Way of_split(const std::string& schedule, P2Policy policy, const std::vector<int>& split, int ranks = 0) {
  return {schedule, policy, static_cast<int>(split.size()), split, ranks};
}

inline std::vector<Way> every(const Splits& splits, const std::vector<std::string>& schedules = kPlainSchedules,
                              const std::vector<P2Policy>& policies = kAnyPolicies, int ranks = 0) {
  std::vector<Way> ways;
  for (const auto& split : splits) {
    for (const auto& schedule : schedules) {
      for (const P2Policy policy : policies) ways.push_back(of_split(schedule, policy, split, ranks));
    }
  }
  return ways;
}

inline std::vector<Way> under_caps(const std::vector<Way>& ways, int64_t bytes) {
  std::vector<Way> capped;
  for (Way way : ways) {
    for (const MemoryCap& cap : {MemoryCap::none(), MemoryCap(1), MemoryCap(bytes), MemoryCap::automatic()}) {
      way.cap = cap;
      capped.push_back(way);
    }
  }
  return capped;
}

inline std::vector<Way> streamed(std::vector<Way> ways) {
  for (Way& way : ways) way.streams = true;
  return ways;
}

inline std::vector<Way> operator+(std::vector<Way> ways, const std::vector<Way>& more) {
  ways.insert(ways.end(), more.begin(), more.end());
  return ways;
}

inline std::string text_of(const Way& way) {
  return concat(way.schedule, ", p2 ", policy_name(way.policy), ", split ", ::testing::PrintToString(way.split), ", ",
                way.stages, " stages, ", way.ranks, " ranks, cap ", way.cap, ", recompute ",
                ::testing::PrintToString(way.recompute), way.streams ? ", streamed" : "");
}

inline Outcome train(Config config, const std::vector<Batch>& batches, const Way& way) {
  config.pipeline.schedule = way.schedule;
  config.pipeline.stages = way.stages;
  config.pipeline.split = way.split;
  config.pipeline.ranks = way.ranks;
  config.pipeline.recompute = way.recompute;
  if (way.streams) config.pipeline.gradients = "streamed";
  if (way.schedule != "auto")
    return train(config, batches, Variant{way.schedule, way.policy, P2Batching::kLoop, way.cap});
  config.pipeline.memory_cap = concat(way.cap);
  Trainer trainer(config);
  const Variant variant = trainer.variant();
  const Schedule* found = variant.schedule.written();
  EXPECT_EQ(found == nullptr, way.streams) << "streamed gradients take a named schedule";
  EXPECT_TRUE(found == nullptr || (found->slices == config.pipeline.slices &&
                                   found->micro_batches == config.pipeline.micro_batches * found->slices));
  return train(trainer, batches, variant);
}

inline void expect_same_bits(const Outcome& expected, const Config& config, const std::vector<Batch>& batches,
                             const std::vector<Way>& ways) {
  for (const Way& way : ways) expect_same_bits(expected, train(config, batches, way), text_of(way));
}

}  // namespace twobp::test
