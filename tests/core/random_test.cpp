// Tests random integers: they match those of SplitMix64's authors, and all values below a bound are equally likely.
#include "twobp/core/random.h"

#include <vector>

#include <gtest/gtest.h>

namespace twobp::TWOBP_FILE {
namespace {

// These are the first words of the authors' generator with the seed 1234567.
TEST(Random, IsSplitMix64) {
  SplitMix64 random(1234567);
  EXPECT_EQ(random(), 6457827717110365317U);
  EXPECT_EQ(random(), 3203168211198807973U);
  EXPECT_EQ(random(), 9817491932198370423U);
}

// This engine returns the given words.
struct Words {
  std::vector<uint64_t> words;
  size_t at = 0;
  uint64_t operator()() { return words.at(at++); }
};

TEST(Random, DrawsAgainAboveTheLastMultiple) {
  const uint64_t most = std::numeric_limits<uint64_t>::max();  // 2^64 - 1 is a multiple of 3 and of 5
  Words past{{most, most - 1}};
  EXPECT_EQ(bounded(past, 3), 2U);
  EXPECT_EQ(past.at, 2U);
  Words all{{most}};
  EXPECT_EQ(bounded(all, 8), 7U) << "a power of two divides 2^64";
  EXPECT_EQ(all.at, 1U);
  Words one{{12345}};
  EXPECT_EQ(bounded(one, 1), 0U);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
