// Tests W in the waits of a rank against the simulation of the same order under `fill` with a byte cap. That is
// independent code, and it makes the same decisions if costs are equal.
#include <algorithm>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/generators/generators.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

Schedule with_p1(Schedule schedule) {
  for (auto& list : schedule.ranks) {
    for (Instruction& i : list) {
      if (i.op == Op::kBackward) i.op = Op::kBackwardP1;
    }
  }
  return schedule;
}

Simulation run(const Schedule& schedule, P2Policy policy, int cap) {
  SimulationOptions options;
  options.cap_per_rank.assign(schedule.ranks.size(), cap);
  return simulate(add_communication(apply_p2_policy(schedule, policy)), std::vector<StageCost>(schedule.stages),
                  options);
}

TEST(PlaceP2, EqualsFillUnderACapWithEqualCosts) {
  Random random(11);
  for (int round = 0; round < 300; ++round) {
    const Schedule order = random_schedule(random, random_int(random, 1, 7), random_int(random, 1, 8),
                                           random_int(random, 1, 4), /*place_w=*/false);
    const int limit = random_int(random, 1, 12);
    const Simulation placed = run(place_p2(with_p1(order), limit), P2Policy::kPlaced, 0);
    const Simulation filled = run(order, P2Policy::kFill, limit);
    ASSERT_EQ(placed.step_seconds, filled.step_seconds) << round;
    for (size_t rank = 0; rank < placed.ranks.size(); ++rank) {
      const auto& a = placed.ranks[rank].timeline;
      const auto& b = filled.ranks[rank].timeline;
      ASSERT_EQ(a.size(), b.size()) << round;
      for (size_t i = 0; i < a.size(); ++i) {
        ASSERT_TRUE(a[i].op == b[i].op && a[i].begin == b[i].begin) << round << " rank " << rank << " op " << i;
      }
    }
  }
}

TEST(PlaceP2, HoldsNoMoreThanTheLimitOrTheNeedOfTheOrder) {
  Random random(12);
  for (int round = 0; round < 300; ++round) {
    const Schedule order = random_schedule(random, random_int(random, 1, 7), random_int(random, 1, 8),
                                           random_int(random, 1, 4), /*place_w=*/false);
    const int limit = random_int(random, 1, 12);
    const Simulation placed = run(place_p2(with_p1(order), limit), P2Policy::kPlaced, 0);
    const Simulation standard = run(order, P2Policy::kOff, 0);  // W runs as early as possible
    for (size_t rank = 0; rank < placed.ranks.size(); ++rank) {
      EXPECT_LE(placed.ranks[rank].peak_in_flight, std::max(limit, standard.ranks[rank].peak_in_flight))
          << round << " rank " << rank;
    }
  }
}

TEST(PlaceP2, RefusesAnOrderThatCannotRun) {
  Schedule schedule = empty_schedule({0, 1}, 2);
  schedule.name = "circle";
  schedule.ranks[0] = {{Op::kForward, 0, 0}, {Op::kBackwardP1, 0, 0}};
  schedule.ranks[1] = {{Op::kForward, 1, 0}, {Op::kForward, 1, 1}, {Op::kBackwardP1, 1, 0}};
  expect_contains(error_of([&] { place_p2(schedule, 4); }), {"'circle'", "no rank can go on"});
}

TEST(P2Places, CountThePiecesThatTheSimulationRunsBeforeAnOp) {
  const Schedule schedule = make_schedule("1f1b", 2, 2, P2Policy::kFill);
  StageCost light, heavy;
  heavy.forward = heavy.backward_p1 = heavy.backward_p2 = 4;
  light.p2_units = 2;
  const Simulation simulation = simulate(schedule, {light, heavy});
  const auto places = p2_places(schedule, simulation);
  for (int rank = 0; rank < 2; ++rank) {
    const auto& list = schedule.ranks[rank];
    ASSERT_EQ(places[rank].size(), list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      // The first rank waits for the second gradient, the second for nothing after its first I.
      const bool waits = rank == 0 && list[i].op == Op::kRecvBackward && list[i].micro_batch == 1;
      EXPECT_EQ(places[rank][i], waits ? 2 : 0) << to_string(list[i]);
    }
  }
  SimulationOptions without;
  without.timeline = false;
  EXPECT_THROW(p2_places(schedule, simulate(schedule, {light, heavy}, without)), Error);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
