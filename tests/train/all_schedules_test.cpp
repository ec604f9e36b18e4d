// Tests the promise of bitwise_test for every named schedule, on its own placement of stages: V-shaped, looped and
// zero-bubble. All of these schedules keep the order of micro-batches.
#include <algorithm>
#include <cctype>
#include <map>

#include <gtest/gtest.h>

#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::Outcome;
using test::random_batches;
using test::tiny_config;

constexpr int kSteps = 2;

Config config_of(const std::string& schedule, int ranks) {
  Config config = tiny_config();
  test::llama_of(config).tied = true;
  config.train.clip_norm = 0.5;
  config.pipeline.schedule = schedule;
  config.pipeline.ranks = ranks;
  config.pipeline.stages = 0;
  return config;
}

int stages_of(const std::string& name, int ranks) {
  return usual_stages_per_rank(named_schedule(name).placement) * ranks;
}

class EverySchedule : public ::testing::TestWithParam<std::string> {};

TEST_P(EverySchedule, TrainsTheSameWeights) {
  const std::string name = GetParam();
  // The number of micro-batches is below, equal to, above and far above the number of ranks. It is even or odd.
  const std::vector<std::pair<int, int>> sizes = {{1, 3}, {2, 1}, {2, 2}, {2, 4}, {2, 5}, {3, 2},
                                                  {3, 3}, {3, 7}, {4, 3}, {4, 4}, {4, 8}};
  std::map<int, Outcome> expected;  // by micro-batches
  int admitted = 0;
  for (const auto& [ranks, micro_batches] : sizes) {
    const int stages = stages_of(name, ranks);
    if (!admits(name, stages, ranks, micro_batches)) continue;
    ++admitted;
    const auto batches = random_batches(kSteps, micro_batches);
    if (!expected.contains(micro_batches)) {
      expected[micro_batches] = test::train(config_of("gpipe", 1), batches, {"gpipe", P2Policy::kOff});
    }
    for (const P2Policy policy : policies_of(name)) {
      const std::string what = concat(name, ", ", ranks, " ranks, M ", micro_batches, ", p2 ", policy_name(policy));
      ASSERT_FALSE(make_schedule(name, stages, micro_batches, policy, ranks).allow_reorder) << what;
      expect_same_bits(expected[micro_batches], test::train(config_of(name, ranks), batches, {name, policy}), what);
    }
  }
  // Only schedules whose table entry allows it may admit fewer sizes.
  EXPECT_GE(admitted, named_schedule(name).takes == nullptr ? static_cast<int>(sizes.size()) : 5);
}

INSTANTIATE_TEST_SUITE_P(All, EverySchedule, ::testing::ValuesIn(schedule_names()), [](const auto& info) {
  std::string name = info.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
});

// Evaluation uses the schedule's placement, too.
TEST(AllSchedules, EvaluateOnTheirPlacement) {
  Config one = config_of("gpipe", 1);
  one.data.held_out = 0.5;
  one.train.eval_batches = 2;
  one.pipeline.micro_batches = 4;  // all schedules accept 4 on 2 ranks
  const auto expected = Trainer(one).evaluate();
  ASSERT_TRUE(expected);
  for (const auto& name : schedule_names()) {
    Config config = config_of(name, 2);
    config.data.held_out = 0.5;
    config.train.eval_batches = 2;
    config.pipeline.micro_batches = one.pipeline.micro_batches;
    EXPECT_EQ(Trainer(config).evaluate(), expected) << name;
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
