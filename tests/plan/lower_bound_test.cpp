// Tests the lower bound: it has known values, and it never exceeds the time of any schedule, including proven optima;
// and the bytes of stages.
#include "tests/plan/pipelines.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
namespace {

double bound_of(const std::vector<StageCost>& costs, int micro_batches) {
  const int ranks = static_cast<int>(costs.size());
  return lower_bound(place_stages(Placement::kLinear, ranks, ranks), micro_batches, costs);
}

// The last rank starts after N - 1 F and never waits again.
TEST(LowerBound, HasKnownValuesForEqualStages) {
  for (const int n : {1, 2, 4, 8}) {
    for (const int m : {8, 20}) EXPECT_EQ(bound_of(std::vector<StageCost>(n), m), 3 * m + n - 1) << n << ' ' << m;
    EXPECT_EQ(bound_of(std::vector<StageCost>(n), 1), 2 * n + 1) << "the way through all stages and back, and W";
  }
}

TEST(LowerBound, CountsEachMicroBatch) {
  std::vector<StageCost> costs;
  for (const double seconds : {1, 5, 2}) {
    StageCost& cost = costs.emplace_back();
    cost.forward = cost.backward_p1 = cost.backward_p2 = seconds;
  }
  EXPECT_EQ(lower_bound(std::vector<int>{0}, 3, costs), 3 * (1 + 5 + 2));
}

TEST(LowerBound, CountsTheBusiestRankAndTheOptimizer) {
  std::vector<StageCost> costs(4);
  costs[2].backward_p2 = 5;
  EXPECT_EQ(bound_of(costs, 10), 2 + 10 * 7);  // F of the two earlier stages, then all work of this rank
  for (StageCost& cost : costs) cost.optimizer = 2;
  EXPECT_EQ(bound_of(costs, 10), 2 + 10 * 7 + 2);
  // F and I of four stages, then W and the optimizer of the first one; or of rank 2: four F, two I, W and its
  // optimizer.
  EXPECT_EQ(bound_of(costs, 1), std::max(4 + 4 + 1 + 2, 4 + 2 + 5 + 2));
  costs[2].optimizer = 9;
  EXPECT_EQ(bound_of(costs, 1), 4 + 2 + 5 + 9) << "what ends on rank 2";
}

TEST(LowerBound, CountsMessages) {
  SimulationOptions options;
  options.message_seconds = 0.5;
  EXPECT_EQ(lower_bound({0, 1, 2}, 1, std::vector<StageCost>(3), options), 3 + 3 + 1 + 4 * 0.5);
  EXPECT_EQ(lower_bound({0, 0, 0}, 1, std::vector<StageCost>(3), options), 3 + 3 + 3) << "one rank sends none";
}

TEST(LowerBound, IsNeverAboveTheProvenOptimum) {
  const auto all = solved_pipelines();
  ASSERT_GE(all.size(), 100U);
  int tight = 0;
  for (const auto& [pipeline, number, optimum] : all) {
    const double bound = lower_bound(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, pipeline.options);
    EXPECT_LE(bound, optimum * (1 + 1e-12)) << "case " << number;
    tight += bound >= optimum * (1 - 1e-12) ? 1 : 0;
  }
  EXPECT_GE(tight, 83) << "of " << all.size() << ": a bound that is less often tight proves fewer schedules optimal";
}

// Any order on any placement.
TEST(LowerBound, IsNeverAboveARandomSchedule) {
  Random random(11);
  for (int round = 0; round < 500; ++round) {
    Schedule schedule =
        random_schedule(random, random_int(random, 1, 6), random_int(random, 1, 7), random_int(random, 1, 4), true);
    std::vector<bool> used(schedule.ranks.size(), false);
    for (const int rank : schedule.rank_of_stage) used[rank] = true;
    if (std::find(used.begin(), used.end(), false) != used.end()) continue;  // a rank has no stage
    auto costs = random_costs(random, schedule.stages, round % 3 != 0);
    if (round % 4 == 3) {
      Pipeline unequal{schedule.rank_of_stage, schedule.micro_batches, costs, {}};
      make_unequal(random, unequal);
      costs = unequal.costs;
    }
    SimulationOptions options;
    options.message_seconds = random_int(random, 0, 2);
    schedule.policy = round % 2 == 0 ? P2Policy::kPlaced : P2Policy::kFill;
    const double bound = lower_bound(schedule.rank_of_stage, schedule.micro_batches, costs, options);
    const Simulation simulation = simulate(add_communication(std::move(schedule)), costs, options);
    EXPECT_LE(bound, simulation.step_seconds * (1 + 1e-9)) << "round " << round;
  }
}

// A stage does not hold a message after it sent it. It does hold a message that it received.
TEST(StageBytes, CountMessagesOnTheRankThatHoldsThem) {
  std::vector<StageCost> costs(2);
  costs[0].output_bytes = 10;
  costs[1].input_gradient_bytes = 3;
  costs[0].layers = {{.p2_units = 1, .forward_peak = 12, .forward_held = 12, .p1_peak = 0, .p1_held = -4, .stash = 1}};
  costs[1].layers = {{.p2_units = 1, .forward_peak = 0, .forward_held = -6, .p1_peak = 0, .p1_held = 0, .stash = 1}};
  const auto bytes = stage_bytes(costs, 2);
  EXPECT_EQ(bytes[0].activation, 2);
  EXPECT_EQ(bytes[1].activation, 4);
  EXPECT_EQ(bytes[0].deficit + bytes[1].deficit, 0);
  EXPECT_EQ(least_activation_bytes({0, 1}, costs), (std::vector<double>{12, 10}));
}

// On a rank with two stages, a micro-batch in the later stage also holds its share of the earlier stage.
TEST(LeastActivationBytes, CountOneMicroBatchInAllStages) {
  std::vector<StageCost> costs(4);
  for (int stage = 0; stage < 4; ++stage) costs[stage].activation_bytes = 1 + stage;
  EXPECT_EQ(least_activation_bytes({0, 1, 1, 0}, costs), (std::vector<double>{5, 5}));
  EXPECT_EQ(least_activation_bytes({0, 0, 1, 2}, costs), (std::vector<double>{3, 3, 4}));
}

// F of a slice may run in all stages before the next slice begins.
TEST(LeastActivationBytes, CountNoSliceBeforeItBegins) {
  StageCost cost;
  cost.layers = {{.forward_peak = 1, .forward_held = 1, .p1_held = -1}};
  std::vector<StageCost> costs(4, cost);  // two stages of two slices
  costs[1].layers[0].forward_peak = 10;   // of the first slice in the second stage
  EXPECT_EQ(least_activation_bytes({0, 0}, costs, 2), std::vector<double>{1 + 10});
  costs[3].layers[0].forward_peak = 10;
  EXPECT_EQ(least_activation_bytes({0, 0}, costs, 2), std::vector<double>{3 + 10});
}

TEST(LowerBound, RefusesBadInput) {
  std::vector<StageCost> costs(2);
  EXPECT_NE(error_of([&] { lower_bound({0, 1, 2}, 4, costs); }), "");
  EXPECT_NE(error_of([&] { lower_bound({0, 1}, 0, costs); }), "");
  EXPECT_NE(error_of([&] { lower_bound({0, 2}, 4, costs); }), "");  // rank 1 has no stage
  EXPECT_NE(error_of([&] { lower_bound({0, -1}, 4, costs); }), "");
  costs[1].forward = -1;
  expect_contains(error_of([&] { lower_bound({0, 1}, 4, costs); }), {"stage 1", "forward"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
