// Tests numbers as text, and medians. An unknown number must not look like a known one.
#include <cmath>

#include <gtest/gtest.h>

#include "twobp/core/measure.h"
#include "twobp/core/text.h"

namespace twobp::TWOBP_FILE {
namespace {

TEST(Figures, RoundsKnownValues) {
  EXPECT_EQ(fixed(0.12345, 3), "0.123");
  EXPECT_EQ(fixed(-2, 1), "-2.0");
  EXPECT_EQ(percent(0.1234), "12.3 %");
  EXPECT_EQ(milliseconds(0.0012345), "1.234 ms");
  EXPECT_EQ(milliseconds(0.12345), "123.5 ms");
  EXPECT_EQ(milliseconds(0.05), "50.0 ms");
  EXPECT_EQ(milliseconds(0.01), "10.0 ms");
  EXPECT_EQ(milliseconds(0.00999), "9.990 ms");
  EXPECT_EQ(number(1234567), "1.2346e+06");
}

TEST(Figures, ZeroHasNoSign) {
  EXPECT_EQ(fixed(-1e-17, 1), "0.0");
  EXPECT_EQ(percent(-0.0), "0.0 %");
  EXPECT_EQ(fixed(-0.05, 2), "-0.05");
  EXPECT_EQ(fixed(-kInfinity, 1), "-inf");
}

TEST(Figures, PrintsUnknownNumbersAsADash) {
  EXPECT_EQ(fixed(kUnknown, 3), "-");
  EXPECT_EQ(fixed(-kUnknown, 0), "-");
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
