// Tests sizes and durations as text on both sides of each change of unit, lists, and the nearest name.
#include "twobp/core/text.h"

#include "tests/expect_error.h"

namespace twobp::TWOBP_FILE {
namespace {

using Parts = std::vector<std::string>;

TEST(Text, PrintsBytesInTheLargestUnitThatFits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.0 KiB");
  EXPECT_EQ(format_bytes(1.5 * 1024), "1.5 KiB");
  EXPECT_EQ(format_bytes(0x1p20), "1.0 MiB");
  EXPECT_EQ(format_bytes(12.25 * 0x1p20), "12.2 MiB");
  EXPECT_EQ(format_bytes(0x1p30), "1.00 GiB");
  EXPECT_EQ(format_bytes(2.345 * 0x1p30), "2.35 GiB");
}

TEST(Text, PrintsSecondsInTheLargestUnitThatFits) {
  EXPECT_EQ(format_seconds(0.045), "45ms");
  EXPECT_EQ(format_seconds(1), "1.0s");
  EXPECT_EQ(format_seconds(12.34), "12.3s");
  EXPECT_EQ(format_seconds(60), "1m00s");
  EXPECT_EQ(format_seconds(185), "3m05s");
  EXPECT_EQ(format_seconds(600), "10m00s");
  EXPECT_EQ(format_seconds(3599), "59m59s");
  EXPECT_EQ(format_seconds(3600), "1h00m");
  EXPECT_EQ(format_seconds(3600 + 2 * 60 + 59), "1h02m");
  EXPECT_EQ(format_seconds(100 * 3600), "100h00m");
}

TEST(Text, FindsANameOrSuggestsTheNearest) {
  EXPECT_EQ(index_of_name("schedule", "gpipe", {"1f1b", "gpipe"}), 1U);
  test::expect_error(
      [] {
        index_of_name("schedule", "1f2b", {"1f1b", "gpipe"});
      },
      {"unknown schedule '1f2b': did you mean '1f1b'? There are 1f1b, gpipe"});
}

TEST(Text, NearestTakesTheFewestChanges) {
  const Parts names = {"1f1b", "gpipe", "zb-v", "zb-h1"};
  EXPECT_EQ(nearest("1f2b", names), "1f1b");
  EXPECT_EQ(nearest("gpip", names), "gpipe");    // one letter is missing
  EXPECT_EQ(nearest("xgpipe", names), "gpipe");  // one letter too many
  EXPECT_EQ(nearest("zb-h", names), "zb-v") << "of equally near names, the first";
  EXPECT_EQ(nearest("zb-h11", names), "zb-h1");
  EXPECT_EQ(nearest("", {"abc", "ab"}), "ab");
  EXPECT_EQ(nearest("abc", {"xxabc", "axc"}), "axc");
  EXPECT_EQ(nearest("abc", {}), "");
}

TEST(Text, SplitsListsAsTheyWereJoined) {
  EXPECT_EQ(join({}), "");
  EXPECT_EQ(join({"a"}), "a");
  EXPECT_EQ(join({"a", "b", "c"}), "a, b, c");
  EXPECT_EQ(split("a,,b,", ','), (Parts{"a", "", "b", ""}));
  EXPECT_EQ(split("", ','), Parts{""});
  EXPECT_EQ(join(split("a,,b", ','), ","), "a,,b");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
