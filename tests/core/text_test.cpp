// Tests numbers, sizes and durations as text on both sides of each change of unit, lists, the nearest name, patterns,
// and text from outside, which must be safe to print on a terminal.
#include "twobp/core/text.h"

#include "tests/expect_error.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"

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

// They must not look like known ones.
TEST(Figures, PrintsUnknownNumbersAsADash) {
  EXPECT_EQ(fixed(kUnknown, 3), "-");
  EXPECT_EQ(fixed(-kUnknown, 0), "-");
}

TEST(Pattern, MatchesWholeTextsAndGivesTheirParts) {
  const Pattern pattern("([a-z]+)(-[0-9]{2,3})?\\.txt");
  EXPECT_EQ(pattern.match("abc-12.txt"), (Parts{"abc-12.txt", "abc", "-12"}));
  EXPECT_EQ(pattern.match("abc.txt"), (Parts{"abc.txt", "abc", ""}));
  for (const std::string text : {"", "abc-1.txt", "abc-1234.txt", "abcxtxt", "abc.txt2", "1abc.txt", "abc.txt\n"}) {
    EXPECT_EQ(pattern.match(text), Parts()) << text;
  }
  EXPECT_EQ(pattern.match(std::string("abc.txt\0", 8)), Parts());
  EXPECT_EQ(Pattern("a|b").match("ab"), Parts()) << "both sides of | are bound to the whole text";
}

TEST(Pattern, RejectsBadPatterns) {
  EXPECT_THROW(Pattern("(a"), Error);
}

TEST(Printable, KeepsText) {
  const std::string text = "layer 1: größer, 日本, 🙂, a\\b";
  EXPECT_EQ(printable(text), text);
  EXPECT_EQ(printable(""), "");
  EXPECT_EQ(printable("\xf4\x8f\xbf\xbf"), "\xf4\x8f\xbf\xbf") << "the last code";
}

TEST(Printable, ShowsControlCharacters) {
  EXPECT_EQ(printable("a\x1b[31mred\x7f"), "a\\x1b[31mred\\x7f");
  EXPECT_EQ(printable(std::string("\0\n\r\t\b", 5)), "\\x00\\n\\r\\t\\x08");
  EXPECT_EQ(printable_lines("a\tb\nc\r"), "a\tb\nc\\r");
  EXPECT_EQ(printable("\xc2\x9b[2J"), "\\u{9b}[2J") << "C1's CSI is an escape, too";
  EXPECT_EQ(printable("abc\xe2\x80\xaegpj.exe"), "abc\\u{202e}gpj.exe") << "right-to-left override";
  EXPECT_EQ(printable("\xe2\x81\xa6\xe2\x81\xa9\xe2\x80\x8f\xd8\x9c"), "\\u{2066}\\u{2069}\\u{200f}\\u{61c}");
  EXPECT_EQ(printable("\xe2\x80\xa8"), "\\u{2028}") << "line separator";
}

// Some terminals read raw bytes as C1 control characters, and decoders disagree about such bytes.
TEST(Printable, ShowsBytesThatAreNotUtf8) {
  EXPECT_EQ(printable("\x9b[2J"), "\\x9b[2J");
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b") << "an overlong form";
  EXPECT_EQ(printable("\xe2\x80"), "\\xe2\\x80") << "cut off";
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "a surrogate";
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80") << "above the last code";
  EXPECT_EQ(printable("\xff\xfe"), "\\xff\\xfe");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
