#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/for_training.h"

namespace twobp::TWOBP_FILE {
namespace {

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
