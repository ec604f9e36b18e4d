// Tests that text from outside is safe to print on a terminal.
#include <gtest/gtest.h>

#include "twobp/core/text.h"

namespace twobp::TWOBP_FILE {
namespace {

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
