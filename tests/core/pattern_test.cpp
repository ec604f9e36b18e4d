#include <gtest/gtest.h>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp::TWOBP_FILE {
namespace {

using Groups = std::vector<std::string>;

TEST(Pattern, MatchesWholeTextsAndGivesTheirGroups) {
  const Pattern pattern("([a-z]+)(-[0-9]{2,3})?\\.txt");
  EXPECT_EQ(pattern.match("abc-12.txt"), (Groups{"abc-12.txt", "abc", "-12"}));
  EXPECT_EQ(pattern.match("abc.txt"), (Groups{"abc.txt", "abc", ""}));
  for (const std::string text : {"", "abc-1.txt", "abc-1234.txt", "abcxtxt", "abc.txt2", "1abc.txt", "abc.txt\n"}) {
    EXPECT_EQ(pattern.match(text), Groups()) << text;
  }
  EXPECT_EQ(pattern.match(std::string("abc.txt\0", 8)), Groups());
  EXPECT_EQ(Pattern("a|b").match("ab"), Groups()) << "both sides of | are bound to the whole text";
}

TEST(Pattern, RejectsBadPatterns) {
  EXPECT_THROW(Pattern("(a"), Error);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
