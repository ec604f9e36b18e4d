// Tests the published figures of the schedules that place W themselves, in the simulator with equal costs.
//
// Peaks are counted as the authors count them. A micro-batch of a stage is held, whole, from the start of its F to the
// end of its W. So the bytes between I and W (the stage's inputs and the derivatives that W reads) weigh as much as the
// activations between F and I. Two stages of a V count as one micro-batch.
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

struct Figures {
  double longest_span = 0;  // from a rank's first instruction to its last
  double step = 0;
  int peak_in_flight = 0;
};

Figures figures_of(const Schedule& schedule) {
  const Simulation simulation = simulate(schedule, std::vector<StageCost>(schedule.stages));
  Figures figures;
  figures.step = simulation.step_seconds;
  for (const auto& rank : simulation.ranks) {
    figures.longest_span = std::max(figures.longest_span, rank.timeline.back().end - rank.timeline.front().begin);
    figures.peak_in_flight = std::max(figures.peak_in_flight, rank.peak_in_flight);
  }
  return figures;
}

Figures placed(const std::string& name, int ranks, int micro_batches) {
  const int stages = ranks * usual_stages_per_rank(named_schedule(name).placement);
  return figures_of(make_schedule(name, stages, micro_batches, P2Policy::kPlaced));
}

TEST(ZeroBubble, H1IsOneForwardOneBackwardWithItsMemoryAndAThirdOfItsIdleTime) {
  for (int n = 1; n <= 32; ++n) {
    for (int m : {n, 2 * n, 4 * n}) {
      const Figures h1 = placed("zb-h1", n, m);
      const Figures standard = figures_of(make_schedule("1f1b", n, m, P2Policy::kOff));
      EXPECT_EQ(h1.peak_in_flight, standard.peak_in_flight) << n << ' ' << m;
      EXPECT_EQ(h1.longest_span, 3 * m + n - 1) << n << ' ' << m;
      EXPECT_EQ(standard.longest_span, 3 * m + 3 * (n - 1)) << n << ' ' << m;
    }
  }
}

TEST(ZeroBubble, H2HasNoBubble) {
  for (int n = 1; n <= 32; ++n) {
    for (int m : {2 * n - 1, 2 * n, 4 * n}) {
      const Figures h2 = placed("zb-h2", n, m);
      EXPECT_EQ(h2.longest_span, 3 * m) << n << ' ' << m;
      EXPECT_EQ(h2.step, 3 * m + n - 1) << n << ' ' << m;  // the last rank starts N - 1 later
      EXPECT_EQ(h2.peak_in_flight, 2 * n - 1) << n << ' ' << m;
    }
  }
}

TEST(ZeroBubble, VHasNoBubbleAtTheMemoryOfOneForwardOneBackward) {
  for (int n = 1; n <= 32; ++n) {
    for (int m : {2 * n - 1, 2 * n, 4 * n}) {
      const Figures v = placed("zb-v", n, m);
      EXPECT_EQ(v.longest_span, 6 * m) << n << ' ' << m;
      EXPECT_EQ(v.step, 6 * m + n - 1) << n << ' ' << m;
      EXPECT_LE(v.peak_in_flight, 2 * n) << n << ' ' << m;
    }
  }
}

TEST(ZeroBubble, HalfAndMinKeepTheirBounds) {
  for (int n = 1; n <= 48; ++n) {
    for (int m : {1, n, 2 * n}) {
      EXPECT_LE(placed("v-half", n, m).peak_in_flight, (n + 2) / 2 * 2) << n << ' ' << m;
      EXPECT_LE(placed("v-min", n, m).peak_in_flight, (n + 4) / 3 * 2) << n << ' ' << m;
    }
  }
}

// A schedule that runs one micro-batch after the other would hold the bounds too, so this test is needed. 1F1B idles
// for 6(N - 1) of these units.
TEST(ZeroBubble, HalfAndMinKeepThePipelineFull) {
  for (int n = 2; n <= 24; ++n) {
    const int m = 4 * n;
    EXPECT_LE(placed("v-half", n, m).longest_span, 6 * m + 3 * n + 1) << n;
    EXPECT_LE(placed("v-min", n, m).longest_span, 6 * m + 4 * n) << n;
    // More micro-batches add no idle time, because the pattern is dense.
    for (const std::string name : {"v-half", "v-min"}) {
      EXPECT_EQ(placed(name, n, m + 7).longest_span, placed(name, n, m).longest_span + 42) << name << ' ' << n;
    }
  }
}

// W in places that were chosen ahead delays a step no more than W that runs only in waits.
TEST(ZeroBubble, PlacedP2DelaysNothing) {
  for (const NamedSchedule& named : named_schedules()) {
    if (!named.places_p2) continue;
    for (int n = 1; n <= 6; ++n) {
      for (int m = 1; m <= 2 * n; ++m) {
        const int stages = n * usual_stages_per_rank(named.placement);
        if (!admits(named.name, stages, n, m)) continue;
        const auto step = [&](P2Policy policy) {
          return simulate(make_schedule(named.name, stages, m, policy, n), std::vector<StageCost>(stages)).step_seconds;
        };
        EXPECT_LE(step(P2Policy::kPlaced), step(P2Policy::kFill)) << named.name << ' ' << n << ' ' << m;
      }
    }
  }
}

// Of two micro-batches, the second comes back to rank 0 after 1 + 4 N, right after the first. Only then there is time
// for their two W of the first stage. All other W fit into waits.
TEST(ZeroBubble, TwoMicroBatchesOfAVWaitForNoW) {
  for (int n = 4; n <= 8; ++n) {
    const Schedule schedule = make_schedule("zb-v", 2 * n, 2, P2Policy::kPlaced);
    EXPECT_EQ(simulate(schedule, std::vector<StageCost>(2 * n)).step_seconds, 1 + 4 * n + 2) << n;
  }
}

TEST(ZeroBubble, SmallOnesMatchCellByCell) {
  const Schedule h1 = zb_h1(2, 3);
  EXPECT_EQ(text_of(h1.ranks[0]), "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2");
  EXPECT_EQ(text_of(h1.ranks[1]), "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2");
  const Schedule v = zb_v(4, 2, 3);
  EXPECT_EQ(text_of(v.ranks[0]), "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2");
  EXPECT_EQ(text_of(v.ranks[1]), "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2");
}

TEST(ZeroBubble, AVNeedsTwoStagesARank) {
  const std::string error = error_of([] { make_schedule("zb-v", 4, 2, P2Policy::kPlaced, 4); });
  expect_contains(error, {"4 stages on 4 ranks", "two stages"});
  expect_contains(error_of([] { make_schedule("v-min", 3, 2, P2Policy::kPlaced); }), {"'v-min'", "multiple of 2"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
