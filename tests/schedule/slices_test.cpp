// Tests schedules over slices of a sequence. Every generator gives a valid schedule, with the bubble and the number of
// slices in flight of the theory. simulate_property_test compares slices of unequal costs with a second implementation.
#include <algorithm>

#include "tests/schedule/named.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {
namespace {

std::vector<StageCost> equal_costs(const Schedule& schedule) {
  return std::vector<StageCost>(schedule.stages);
}

// make_schedule validates the schedule.
TEST(Slices, EveryScheduleTakesThemUnderEveryPolicy) {
  Random random(1);
  for (const NamedSchedule& named : named_schedules()) {
    if (!named.takes_slices) continue;
    for (int i = 0; i < 40; ++i) {
      const int ranks = random_int(random, 1, 9);
      const int micro_batches = random_int(random, 1, 6);
      const int slices = random_int(random, 1, 9);
      const bool looped = named.placement == Placement::kLooped;
      const int stages = looped ? ranks * random_int(random, 1, 3) : stages_on(named.name, ranks);
      ASSERT_TRUE(admits(named.name, stages, ranks, micro_batches, slices));
      for (const P2Policy policy : policies_of(named.name)) {
        SCOPED_TRACE(concat(named.name, " on ", ranks, " ranks, ", stages, " stages, ", micro_batches, " x ", slices,
                            ", p2 ", policy_name(policy)));
        const Schedule schedule = make_schedule(named.name, stages, micro_batches, policy, ranks, slices);
        EXPECT_EQ(schedule.micro_batches, micro_batches * slices);
        EXPECT_EQ(schedule.slices, slices);
        const Simulation simulation = simulate(schedule, equal_costs(schedule));
        for (const RankSimulation& rank : simulation.ranks) {
          EXPECT_NEAR(rank.busy, 3.0 * stages / ranks * schedule.micro_batches, 1e-6);
        }
      }
    }
  }
}

TEST(Slices, BackwardRunsThemLastToFirst) {
  const Schedule schedule = make_schedule("1f1b", 2, 2, P2Policy::kOff, 0, 3);
  std::string text;
  for (const Instruction& instruction : schedule.ranks[1]) {
    if (instruction.op == Op::kForward || instruction.op == Op::kBackward)
      text += to_string(instruction, schedule.slices) + " ";
  }
  EXPECT_EQ(text, "1F0.0 1F0.1 1F0.2 1B0.2 1F1.0 1B0.1 1F1.1 1B0.0 1F1.2 1B1.2 1B1.1 1B1.0 ");
}

// With equal costs, the bubble of 1F1B and GPipe is (N - 1) / (k M + N - 1).
TEST(Slices, BubbleEqualsThatOfAsManyMicroBatches) {
  for (const char* name : {"1f1b", "gpipe"}) {
    for (const int ranks : {2, 4, 8, 32}) {
      for (const int micro_batches : {1, 2, 4}) {
        for (const int slices : {1, 4, 8}) {
          const Schedule schedule = make_schedule(name, ranks, micro_batches, P2Policy::kOff, 0, slices);
          const double bubble = simulate(schedule, equal_costs(schedule)).bubble_ratio();
          EXPECT_NEAR(bubble, (ranks - 1.0) / (slices * micro_batches + ranks - 1), 1e-9)
              << name << " " << ranks << " " << micro_batches << " " << slices;
        }
      }
    }
  }
}

// The fullest rank holds k + N - 1 slices, or all slices if there are fewer, instead of N micro-batches of k slices.
TEST(Slices, TheFullestRankHoldsFew) {
  for (const int ranks : {2, 4, 8}) {
    for (const int micro_batches : {1, 2, 8}) {
      for (const int slices : {1, 2, 8}) {
        const int all = micro_batches * slices;
        const Schedule schedule = make_schedule("1f1b", ranks, micro_batches, P2Policy::kOff, 0, slices);
        const Simulation simulation = simulate(schedule, equal_costs(schedule));
        EXPECT_EQ(simulation.ranks[0].peak_in_flight, std::min(slices + ranks - 1, all));
        const Schedule zb = make_schedule("zb-h1", ranks, micro_batches, P2Policy::kPlaced, 0, slices);
        EXPECT_LE(simulate(zb, equal_costs(zb)).ranks[0].peak_in_flight, std::min(slices + ranks - 1, all));
        const Schedule v = make_schedule("zb-v", 2 * ranks, micro_batches, P2Policy::kPlaced, 0, slices);
        EXPECT_LE(simulate(v, equal_costs(v)).ranks[0].peak_in_flight, std::min(2 * (slices + ranks - 1), 2 * all));
      }
    }
  }
}

// Every slice more is one more in flight in both stages of a rank. The pattern stays dense: a micro-batch more adds its
// work, and no idle time.
TEST(Slices, TheVsWithLittleMemoryStayDense) {
  for (const int ranks : {2, 3, 4, 5, 6}) {
    for (const int slices : {2, 3, 4}) {
      const auto run = [&](const char* name, int micro_batches) {
        const Schedule schedule = make_schedule(name, 2 * ranks, micro_batches, P2Policy::kPlaced, ranks, slices);
        return simulate(schedule, equal_costs(schedule));
      };
      for (const auto& [name, limit] : {std::pair{"v-half", (ranks + 2) / 2 * 2}, {"v-min", (ranks + 4) / 3 * 2}}) {
        const Simulation simulation = run(name, 2 * ranks);
        int most = 0;
        for (const RankSimulation& rank : simulation.ranks) most = std::max(most, rank.peak_in_flight);
        EXPECT_EQ(most, limit + 2 * (slices - 1)) << name << ' ' << ranks << ' ' << slices;
        EXPECT_EQ(run(name, 2 * ranks + 1).step_seconds - simulation.step_seconds, 6 * slices);
      }
    }
  }
}

TEST(Slices, NeedCostsOfEach) {
  const Schedule schedule = make_schedule("gpipe", 2, 1, P2Policy::kOff, 0, 2);
  std::vector<StageCost> costs(3);
  test::expect_error([&] { simulate(schedule, costs); },
                     {"needs 2 costs, one for each stage", "each of the 2 slices of all", "got 3 costs"});
  costs.emplace_back().p2_units = 3;
  test::expect_error([&] { simulate(schedule, costs); }, {"stage 1", "row 1"});
}

TEST(Slices, OtherOrdersAreRefused) {
  Schedule forwards = make_schedule("gpipe", 1, 1, P2Policy::kOff, 0, 2);
  std::swap(forwards.ranks[0][0], forwards.ranks[0][1]);
  test::expect_error([&] { validate(forwards); }, {"0F0.1 comes where 0F0.0 is due", "first to last"});
  Schedule backwards = make_schedule("gpipe", 1, 1, P2Policy::kOff, 0, 2);
  std::swap(backwards.ranks[0][2], backwards.ranks[0][3]);
  backwards.allow_reorder = true;  // slices depend on each other
  test::expect_error([&] { validate(backwards); }, {"0B0.0 comes where 0B0.1 is due", "last to first"});
  Schedule odd = make_schedule("gpipe", 1, 3, P2Policy::kOff);
  odd.slices = 2;
  test::expect_error([&] { validate(odd); }, {"3 slices", "not a multiple of"});
}

TEST(Slices, SomeSchedulesHaveNone) {
  EXPECT_FALSE(admits("dualpipe-v", 4, 2, 4, 2));
  test::expect_error([] { make_schedule("dualpipe-v", 4, 4, P2Policy::kFill, 2, 2); },
                     {"dualpipe-v", "no form with slices"});
  test::expect_error([] { make_schedule("1f1b", 4, 4, P2Policy::kFill, 0, 0); }, {"at least 1 slice"});
  test::expect_error([] { make_schedule("1f1b", 64, 1 << 10, P2Policy::kFill, 0, 1 << 20); }, {"too large"});
}

TEST(Slices, GridNamesThem) {
  const Schedule schedule = make_schedule("1f1b", 1, 2, P2Policy::kEnd, 0, 2);
  const std::string grid = draw_grid(schedule, simulate(schedule, equal_costs(schedule)), 1);
  EXPECT_NE(grid.find("F0.0 F0.1 I0.1 F1.0 I0.0 F1.1 I1.1 I1.0 W0.1 W0.0 W1.1 W1.0"), std::string::npos) << grid;
}

}  // namespace
}  // namespace twobp
