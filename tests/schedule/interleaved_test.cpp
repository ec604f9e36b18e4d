// Tests schedules with several stages a rank on a looped placement, and 1F1B that runs ahead.
#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/generators/generators.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

Simulation run(const std::string& name, int stages, int ranks, int micro_batches, P2Policy policy,
               const SimulationOptions& options = {}) {
  return simulate(make_schedule(name, stages, micro_batches, policy, ranks), std::vector<StageCost>(stages), options);
}

int peak_in_flight(const Simulation& simulation) {
  int peak = 0;
  for (const auto& rank : simulation.ranks) peak = std::max(peak, rank.peak_in_flight);
  return peak;
}

TEST(Interleaved, MatchesCellByCell) {
  const Schedule schedule = interleaved_one_forward_one_backward(4, 2, 4);
  EXPECT_EQ(schedule.rank_of_stage, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
}

// A unit is a stage's F. A micro-batch takes a rank 3v over its v stages. So the idle time of 3(N - 1) is (N
// - 1) / v of that.
TEST(Interleaved, TheBubbleShrinksWithTheStagesOnARank) {
  for (int n = 1; n <= 8; ++n) {
    for (int v = 1; v <= 4; ++v) {
      for (int rounds = 1; rounds <= 4; ++rounds) {
        const int m = rounds * n;
        EXPECT_EQ(run("interleaved-1f1b", v * n, n, m, P2Policy::kOff).step_seconds, 3 * v * m + 3 * (n - 1))
            << n << ' ' << v << ' ' << m;
      }
    }
  }
}

// PyTorch and Megatron refuse rounds of unequal size. Such rounds stall, but that costs less than an idle rank up to
// the next multiple of N.
TEST(Interleaved, TakesAnyNumberOfMicroBatches) {
  for (int n = 2; n <= 8; ++n) {
    for (int v = 2; v <= 3; ++v) {
      for (int m = n; m <= 6 * n; ++m) {
        const int padded = (m + n - 1) / n * n;
        EXPECT_LE(run("interleaved-1f1b", v * n, n, m, P2Policy::kOff).step_seconds, 3 * v * padded + 3 * (n - 1))
            << n << ' ' << v << ' ' << m;
      }
    }
  }
}

TEST(Interleaved, PlacedP2LeavesAThirdOfTheBubbleAtTheMemoryOfTheFirstRank) {
  for (int n = 1; n <= 8; ++n) {
    for (int v = 1; v <= 4; ++v) {
      const int m = 4 * n;
      const Simulation placed = run("interleaved-zb", v * n, n, m, P2Policy::kPlaced);
      double span = 0;
      for (const auto& rank : placed.ranks) {
        span = std::max(span, rank.timeline.back().end - rank.timeline.front().begin);
      }
      EXPECT_EQ(span, 3 * v * m + n - 1) << n << ' ' << v;
      EXPECT_EQ(peak_in_flight(placed), v * n) << n << ' ' << v;
    }
  }
}

TEST(Interleaved, WithOneStageARankItIsZbH1) {
  for (int n = 1; n <= 6; ++n) {
    for (int m = 1; m <= 2 * n; ++m) {
      const Schedule one = interleaved_zero_bubble(n, n, m);
      EXPECT_EQ(one.ranks, zb_h1(n, m).ranks) << n << ' ' << m;
    }
  }
}

TEST(Interleaved, NeedsWholeRounds) {
  expect_contains(error_of([] { make_schedule("interleaved-1f1b", 6, 4, P2Policy::kOff, 4); }),
                  {"6 stages on 4 ranks", "the same number of stages"});
}

TEST(LoopedBfs, MatchesCellByCell) {
  const Schedule schedule = looped_bfs(4, 2, 2);
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1");
}

TEST(LoopedBfs, HasTheBubbleOfInterleavedAndHoldsEveryMicroBatch) {
  for (int n = 1; n <= 6; ++n) {
    for (int m : {n, 2 * n, 3 * n + 1}) {
      const Simulation simulation = run("looped-bfs", 2 * n, n, m, P2Policy::kOff);
      EXPECT_EQ(simulation.step_seconds, 6 * m + 3 * (n - 1)) << n << ' ' << m;
      EXPECT_EQ(peak_in_flight(simulation), 2 * m);
    }
  }
}

TEST(Eager, RunsAheadTwiceAsFar) {
  const Schedule schedule = eager_one_forward_one_backward(3, 6);
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5");
  EXPECT_EQ(text_of(schedule.ranks[2]), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5");
}

// This is the purpose of the schedule. If messages take time, 1F1B waits for two of them in each round, and this
// schedule waits for none.
TEST(Eager, HidesMessages) {
  SimulationOptions slow;
  slow.message_seconds = 1;
  const int n = 4;
  const int m = 32;
  const double eager = run("eager-1f1b", n, n, m, P2Policy::kOff, slow).step_seconds;
  EXPECT_LT(eager, 0.75 * run("1f1b", n, n, m, P2Policy::kOff, slow).step_seconds);
  EXPECT_LE(eager,
            // The start-up has additional messages, and little else is longer.
            3 * m + 3 * (n - 1) + 2 * (n - 1) + n);
  EXPECT_EQ(peak_in_flight(run("eager-1f1b", n, n, m, P2Policy::kOff)), 2 * n - 1);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
