// Tests the clock of time-outs: a process that stood still has not waited.
#include <thread>

#include <gtest/gtest.h>

#include "twobp/core/measure.h"

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

}  // namespace
}  // namespace twobp::TWOBP_FILE
