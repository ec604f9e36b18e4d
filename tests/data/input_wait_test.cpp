// Tests the warning that training waits for data: when it comes, that it comes once, and its text.
#include "twobp/data/input_wait.h"

#include <gtest/gtest.h>

namespace twobp::TWOBP_FILE {
namespace {

// Returns the number of steps until the warning, or 0 if there is none within 100 steps.
int steps_until_warning(InputWait& wait, double waited, double took) {
  for (int step = 1; step <= 100; ++step) {
    if (wait.after_step(waited, took)) return step;
  }
  return 0;
}

TEST(InputWait, WarnsOnceWhenWaitsExceedAHundredth) {
  InputWait wait(3);
  EXPECT_EQ(steps_until_warning(wait, 0.2, 9.8), 12);
  EXPECT_EQ(steps_until_warning(wait, 0.5, 0.5), 0);
}

TEST(InputWait, IsSilentBelowAHundredth) {
  InputWait wait(1);
  EXPECT_EQ(steps_until_warning(wait, 0.009, 1), 0);
  EXPECT_EQ(steps_until_warning(wait, 1, 1), 1);  // most of the total time, by then
}

TEST(InputWait, IsSilentAboutMilliseconds) {
  InputWait wait(1);
  EXPECT_EQ(steps_until_warning(wait, 0.001, 0.001), 0);
}

TEST(InputWait, DoesNotCountTheStart) {
  InputWait wait(1);
  EXPECT_FALSE(wait.after_step(100, 1));
  EXPECT_FALSE(wait.after_step(100, 1));
  EXPECT_EQ(steps_until_warning(wait, 0, 1), 0);
}

TEST(InputWait, SaysHowLongAndWhatToDo) {
  InputWait wait(3);
  std::string text;
  for (int step = 0; step < 12; ++step) text += wait.after_step(0.25, 0.75).value_or("");
  for (const char* part : {"25%", "250ms", "data.workers (now 3)"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
