// Tests which of the fastest rows comes first, with handmade rows on both sides of each limit.
#include <gtest/gtest.h>

#include "twobp/plan/planner.h"

namespace twobp::TWOBP_FILE {
namespace {

PlanChoice choice(double samples_per_second, double peak_bytes) {
  PlanChoice one;
  one.micro_batches = one.micro_batch_size = 1;
  one.step_seconds = 1 / samples_per_second;
  one.peak_bytes = peak_bytes;
  return one;
}

std::vector<PlanChoice> ranked(const std::vector<PlanChoice>& choices, size_t most = 100) {
  std::vector<PlanChoice> best;
  for (const PlanChoice& one : choices) insert_by_speed(best, one, most);
  return best;
}

double first_bytes(std::vector<PlanChoice> best) {
  return lightest_of_fastest(best)->peak_bytes;
}

TEST(Ranking, PutsTheFastestFirstAndLessMemoryAmongEquals) {
  const auto best = ranked({choice(90, 1), choice(100, 3), choice(100, 2), choice(95, 1)}, 3);
  ASSERT_EQ(best.size(), 3U);
  EXPECT_EQ(best[0].peak_bytes, 2);
  EXPECT_EQ(best[1].peak_bytes, 3);
  EXPECT_DOUBLE_EQ(best[2].samples_per_second(), 95);
}

TEST(Ranking, GivesUpOnePercentForLessMemory) {
  EXPECT_EQ(first_bytes(ranked({choice(100, 10)})), 10);
  EXPECT_EQ(first_bytes(ranked({choice(100, 10), choice(99.01, 5)})), 5);
  EXPECT_EQ(first_bytes(ranked({choice(100, 10), choice(98.99, 5)})), 10);
}

TEST(Ranking, GivesUpNothingForLessThanFivePercent) {
  EXPECT_EQ(first_bytes(ranked({choice(100, 10.4), choice(99.5, 10)})), 10.4);
  EXPECT_EQ(first_bytes(ranked({choice(100, 10.6), choice(99.5, 10)})), 10);
  EXPECT_EQ(first_bytes(ranked({choice(100, 12), choice(99.7, 10.4), choice(99.5, 10)})), 10.4)
      << "the fastest of those that need little";
}

TEST(Ranking, ComparesALimitedNumber) {
  std::vector<PlanChoice> choices;
  for (size_t i = 0; i + 1 < kCompared; ++i) choices.push_back(choice(100, 10));
  choices.push_back(choice(99.9, 5));
  EXPECT_EQ(first_bytes(ranked(choices)), 5);
  choices.push_back(choice(99.8, 1));
  EXPECT_EQ(first_bytes(ranked(choices)), 5);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
