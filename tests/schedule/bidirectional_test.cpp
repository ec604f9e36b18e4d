// Chimera, whose two copies of the model are two chains of stages, and DualPipe-V.
#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/schedule/named.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/generators/chimera.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {
namespace {

TEST(Chimera, CellByCell) {
  const Schedule schedule = chimera(8, 4, 4);
  EXPECT_EQ(schedule.replicas, 2);
  EXPECT_EQ(schedule.micro_batches, 2);
  EXPECT_EQ(schedule.rank_of_stage, (std::vector<int>{0, 1, 2, 3, 3, 2, 1, 0}));
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0F1 7F0 7B0 7F1 7B1 0B0 0B1");
  EXPECT_EQ(text_of(schedule.ranks[1]), "1F0 6F0 1F1 6F1 6B0 1B0 6B1 1B1");
  EXPECT_EQ(text_of(schedule.ranks[3]), "4F0 4F1 3F0 3B0 3F1 3B1 4B0 4B1");
}

// Each copy's ends have no neighbour, although their numbers follow on.
TEST(Chimera, CopiesExchangeNothing) {
  const Schedule schedule = make_schedule("chimera", 4, 2, P2Policy::kOff);
  EXPECT_EQ(text_of(schedule.ranks[0]), "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0");
  EXPECT_EQ(text_of(schedule.ranks[1]), "2F0 2SEND_F0 1RECV_F0 1F0 1B0 1SEND_B0 2RECV_B0 2B0");

  Schedule crossed = schedule;
  crossed.ranks[1].insert(crossed.ranks[1].begin(), {Op::kRecvForward, 2, 0});
  const std::string error = error_of([&] { validate(crossed); });
  expect_contains(error, {"2RECV_F0", "stage 2 is the first"});
  Schedule odd = schedule;
  odd.replicas = 3;
  expect_contains(error_of([&] { validate(odd); }), {"4 stages", "3 copies"});
}

// F and B of one unit: N - 2 units idle, for any whole number of units of N micro-batches (the paper's bubble
// ratio of (N - 2) / (2N + N - 2) for one). A step of this simulator has B of I and W.
TEST(Chimera, BubbleOfThePaper) {
  StageCost cost;
  cost.backward_p1 = 0.5;
  cost.backward_p2 = 0.5;
  for (int n = 2; n <= 16; n += 2) {
    for (int units = 1; units <= 4; ++units) {
      const Schedule schedule = make_schedule("chimera", 2 * n, units * n, P2Policy::kOff);
      const Simulation simulation = simulate(schedule, std::vector<StageCost>(2 * n, cost));
      EXPECT_EQ(simulation.step_seconds, 2 * units * n + n - 2) << n << ' ' << units;
    }
  }
}

// Two ranks, each with a stage of both copies: the sum of a stage's gradients waits for the copy that is last
// done with it, wherever that is.
TEST(Chimera, CopiesSumTheirGradients) {
  const Schedule schedule = make_schedule("chimera", 4, 2, P2Policy::kOff);
  std::vector<StageCost> costs(4);  // ranks 0: 0 F, 3 F, 3 B, 0 B; 1: the other way; done at 4 and 6
  SimulationOptions options;
  EXPECT_EQ(simulate(schedule, costs, options).step_seconds, 6);
  costs[0].gradient_bytes = costs[2].gradient_bytes = 10;  // the model's first stage, last done on both ranks
  options.data_parallel = {2, 0, 10, true};                // a ring of two carries everything once
  EXPECT_EQ(simulate(schedule, costs, options).step_seconds, 7);
  costs[0].gradient_bytes = 0;
  costs[0].backward_p1 = 5;  // on rank 0 alone, and rank 1's stage 2 sums with it
  EXPECT_EQ(simulate(schedule, costs, options).step_seconds, 11);
  costs[2].gradient_bytes = 0;
  EXPECT_EQ(simulate(schedule, costs, options).step_seconds, 10);
  costs[1].gradient_bytes = costs[3].gradient_bytes = 10;  // done at 4 on both: beside what is left
  EXPECT_EQ(simulate(schedule, costs, options).step_seconds, 10);
}

// The paper's bounds for M = N: from N / 2 + 1 stages' micro-batches on the outer ranks to N on those in the
// middle.
TEST(Chimera, ActivationsOfThePaper) {
  for (int n = 4; n <= 16; n += 2) {
    const Schedule schedule = make_schedule("chimera", 2 * n, n, P2Policy::kOff);
    const Simulation simulation = simulate(schedule, std::vector<StageCost>(2 * n));
    EXPECT_EQ(simulation.ranks[0].peak_in_flight, n / 2 + 1) << n;
    EXPECT_EQ(simulation.ranks[n / 2].peak_in_flight, n) << n;
    for (const auto& rank : simulation.ranks) EXPECT_LE(rank.peak_in_flight, n) << n;
  }
}

TEST(Chimera, SaysWhatItAdmits) {
  expect_contains(error_of([] { make_schedule("chimera", 6, 4, P2Policy::kOff); }),
                  {"'chimera'", "even number of ranks, got 3"});
  expect_contains(error_of([] { make_schedule("chimera", 4, 3, P2Policy::kOff); }),
                  {"'chimera'", "even number of micro-batches", "got 3"});
  EXPECT_EQ(named_schedule("chimera").replicas, 2);
  const auto names = runnable_schedule_names();
  EXPECT_EQ(std::count(names.begin(), names.end(), "chimera"), 0);
  EXPECT_EQ(names.size() + 1, schedule_names().size());
}

TEST(DualPipeV, SaysWhatItAdmits) {
  expect_contains(error_of([] { make_schedule("dualpipe-v", 8, 7, P2Policy::kPlaced); }),
                  {"'dualpipe-v' on 4 ranks", "at least 8 micro-batches", "got 7", "'zb-v'"});
}

TEST(DualPipeV, HoldsOneMoreThanTwoARank) {
  for (int n = 1; n <= 16; ++n) {
    const Schedule schedule = make_schedule("dualpipe-v", 2 * n, 4 * n, P2Policy::kPlaced);
    const Simulation simulation = simulate(schedule, std::vector<StageCost>(2 * n));
    int peak = 0;
    for (const auto& rank : simulation.ranks) peak = std::max(peak, rank.peak_in_flight);
    EXPECT_LE(peak, 2 * n + 1) << n;
  }
}

// No schedule can be faster: a rank cannot start before its first input can be there, then has its work to
// do; and one micro-batch has to go through all stages and back.
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
      if (schedule.is_first(stage)) path = 0;
      const int rank = schedule.rank_of_stage[stage];
      start[rank] = std::min(start[rank], path);
      path += costs[stage].forward;
      work[rank] += schedule.micro_batches *
                    (costs[stage].forward + costs[stage].backward_p1 + costs[stage].backward_p2);
      if (!schedule.is_last(stage)) continue;
      for (int s = stage; s > stage - schedule.stages_per_replica(); --s) path += costs[s].backward_p1;
    }
    const double step = simulate(schedule, costs).step_seconds;
    EXPECT_GE(step, path) << schedule.name;
    for (size_t rank = 0; rank < work.size(); ++rank) {
      EXPECT_GE(step, start[rank] + work[rank]) << schedule.name << ' ' << schedule.stages;
    }
  }
}

}  // namespace
}  // namespace twobp
