// Tests DualPipe-V, and lower bounds on the time of every named schedule.
#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/schedule/named.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

TEST(DualPipeV, NamesTheAllowedSizes) {
  expect_contains(error_of([] { make_schedule("dualpipe-v", 8, 7, P2Policy::kPlaced); }),
                  {"'dualpipe-v' on 4 ranks", "at least 8 micro-batches", "got 7", "'zb-v'"});
}

TEST(DualPipeV, HoldsAtMostOneMoreThanTwoARank) {
  for (int n = 1; n <= 16; ++n) {
    const Schedule schedule = make_schedule("dualpipe-v", 2 * n, 4 * n, P2Policy::kPlaced);
    const Simulation simulation = simulate(schedule, std::vector<StageCost>(2 * n));
    int peak = 0;
    for (const auto& rank : simulation.ranks) peak = std::max(peak, rank.peak_in_flight);
    EXPECT_LE(peak, 2 * n + 1) << n;
  }
}

// No schedule can be faster. A rank cannot start before its first input can arrive, and then it has its work to do. One
// micro-batch must go through all stages and back.
TEST(EveryNamedSchedule, TakesAtLeastItsLowerBounds) {
  Random random(13);
  for (int round = 0; round < 300; ++round) {
    const Schedule schedule = random_named_schedule(random, 8, 24);
    std::vector<StageCost> costs(schedule.stages);
    for (StageCost& cost : costs) {
      cost.forward = random_int(random, 1, 5);
      cost.backward_p1 = random_int(random, 1, 5);
      cost.backward_p2 = random_int(random, 1, 5);
    }
    std::vector<double> work(schedule.ranks.size(), 0);
    std::vector<double> start(schedule.ranks.size(), 1e9);
    double path = 0;
    for (int stage = 0; stage < schedule.stages; ++stage) {
      const int rank = schedule.rank_of_stage[stage];
      start[rank] = std::min(start[rank], path);
      path += costs[stage].forward;
      work[rank] +=
          schedule.micro_batches * (costs[stage].forward + costs[stage].backward_p1 + costs[stage].backward_p2);
    }
    for (const StageCost& cost : costs) path += cost.backward_p1;
    const double step = simulate(schedule, costs).step_seconds;
    EXPECT_GE(step, path) << schedule.name;
    for (size_t rank = 0; rank < work.size(); ++rank) {
      EXPECT_GE(step, start[rank] + work[rank]) << schedule.name << ' ' << schedule.stages;
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
