// Tests the clock of time-outs, for which a process that stood still has not waited, and medians.
#include "twobp/core/measure.h"

#include <cmath>
#include <thread>

#include <gtest/gtest.h>

#include "twobp/core/text.h"

namespace twobp::TWOBP_FILE {
namespace {

void sleep(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

TEST(Patience, CountsShortGapsWhole) {
  awake_seconds();
  const double before = now_seconds();
  const double begin = awake_seconds();
  sleep(0.02);
  const double counted = awake_seconds() - begin;
  const double passed = now_seconds() - before;
  EXPECT_GE(counted, 0.02);
  EXPECT_LE(counted, passed);
}

// A gap of more than a second counts as one.
TEST(Patience, CountsASecondOfALongGap) {
  for (int gap = 0; gap < 2; ++gap) {
    const double begin = awake_seconds();
    sleep(1.2);
    EXPECT_NEAR(awake_seconds() - begin, 1, 1e-6);
  }
}

TEST(Patience, EndsAWait) {
  std::condition_variable changed;
  std::mutex mutex;
  std::unique_lock lock(mutex);
  EXPECT_TRUE(wait_patiently(changed, lock, 0, [] { return true; }));
  const double begin = awake_seconds();
  EXPECT_FALSE(wait_patiently(changed, lock, 0.05, [] { return false; }));
  EXPECT_GE(awake_seconds() - begin, 0.05);
  int asked = 0;
  EXPECT_TRUE(wait_patiently(changed, lock, 60, [&] { return ++asked == 2; })) << "it looks again by itself";
}

TEST(Median, IsTheMiddle) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(median({7}), 7);
}

TEST(Median, IsUnknownIfASampleIsUnknown) {
  EXPECT_TRUE(std::isnan(median({1, kUnknown, 3})));
  EXPECT_TRUE(std::isnan(median({kUnknown})));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
