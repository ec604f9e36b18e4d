// Tests splits that change by moving layers. The search reaches the best split if each move improves. It
// never takes a split that does not fit, and it stops after the allowed number of tries.
#include <algorithm>
#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "twobp/plan/planner.h"

namespace twobp::TWOBP_FILE {
namespace {

using Split = std::vector<int>;

// Returns the distance of the stages from the wanted lengths.
SecondsOfSplit distance_to(Split wanted) {
  return [wanted](const Split& split) -> std::optional<double> {
    double seconds = 1;
    for (size_t s = 0; s < split.size(); ++s) seconds += std::abs(split[s] - wanted[s]);
    return seconds;
  };
}

TEST(MoveLayers, ReachesTheBestIfEveryMoveImproves) {
  const Split wanted = {1, 7, 2, 6};
  const auto seconds_of = distance_to(wanted);
  EXPECT_EQ(move_layers({4, 4, 4, 4}, *seconds_of({4, 4, 4, 4}), 1000, seconds_of), wanted);
  EXPECT_EQ(move_layers(wanted, 1, 1000, seconds_of), wanted);
}

// In a V, one rank has the outer stages and the other has the inner ones. With the ranks balanced, only two
// moves at once improve the split.
TEST(MoveLayers, MovesTwoAtOnce) {
  const auto seconds_of = [](const Split& split) -> std::optional<double> {
    return 100.0 * std::abs(split[0] + split[3] - split[1] - split[2]) + split[3];
  };
  const Split found = move_layers({4, 4, 4, 4}, 4, 1000, seconds_of);
  EXPECT_EQ(found[3], 1);
  EXPECT_EQ(found[0] + found[3], found[1] + found[2]);
}

TEST(MoveLayers, TakesOnlyWhatFits) {
  int tried = 0;
  const auto seconds_of = [&](const Split& split) -> std::optional<double> {
    ++tried;
    EXPECT_EQ(std::accumulate(split.begin(), split.end(), 0), 12);
    EXPECT_GE(*std::min_element(split.begin(), split.end()), 1);
    if (split[0] > 6) return std::nullopt;
    return 20.0 - split[0];
  };
  EXPECT_EQ(move_layers({4, 4, 4}, 16, 1000, seconds_of)[0], 6);
  EXPECT_GT(tried, 2);
  tried = 0;
  EXPECT_EQ(move_layers({4, 4, 4}, 16, 1, seconds_of)[0], 4) << "the first move, of stage 0's last layer";
  EXPECT_EQ(tried, 1);
  EXPECT_EQ(move_layers({4, 4, 4}, 16, 0, seconds_of), (Split{4, 4, 4}));
}

// Measured costs cannot tell so small a difference.
TEST(MoveLayers, KeepsASplitThatIsHardlySlower) {
  const auto seconds_of = [](const Split& split) -> std::optional<double> { return 10 - 1e-3 * split[0]; };
  EXPECT_EQ(move_layers({4, 4}, *seconds_of({4, 4}), 1000, seconds_of), (Split{4, 4}));
}

TEST(MoveLayers, HasNoMovesForOneStage) {
  const auto seconds_of = [](const Split&) -> std::optional<double> { return 0.0; };
  EXPECT_EQ(move_layers({5}, 1, 1000, seconds_of), (Split{5}));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
