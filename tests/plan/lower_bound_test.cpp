// Tests the lower bound: it has known values, and it never exceeds the time of any schedule, including proven
// optima.
#include "tests/plan/pipelines.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
namespace {

double bound_of(int ranks, int micro_batches, double cap = 0) {
  SimulationOptions options;
  if (cap > 0) options.cap_per_rank.assign(ranks, cap);
  return lower_bound(place_stages(Placement::kLinear, ranks, ranks), micro_batches, std::vector<StageCost>(ranks),
                     options)
      .seconds;
}

// Either the last rank starts after N - 1 F and never waits again, or the last micro-batch goes through all
// stages and back.
TEST(LowerBound, HasKnownValuesForEqualStages) {
  for (const int n : {1, 2, 4, 8}) {
    for (const int m : {1, 2, 4, 8, 20}) {
      EXPECT_EQ(bound_of(n, m), std::max(3 * m + n - 1, 2 * m + 2 * n - 1)) << n << ' ' << m;
    }
  }
}

TEST(LowerBound, CountsEachMicroBatch) {
  std::vector<StageCost> costs;
  for (const double seconds : {1, 5, 2}) {
    StageCost& cost = costs.emplace_back();
    cost.forward = cost.backward_p1 = cost.backward_p2 = seconds;
  }
  EXPECT_EQ(twobp::lower_bound(std::vector<int>{0}, 3, costs).seconds, 3 * (1 + 5 + 2));
}

TEST(LowerBound, NamesTheBusiestRank) {
  std::vector<StageCost> costs(4);
  costs[2].backward_p2 = 5;
  const LowerBound bound = lower_bound({0, 1, 2, 3}, 10, costs);
  EXPECT_EQ(bound.rank, 2);
  EXPECT_EQ(bound.seconds, 2 + 10 * 7);  // F of the two earlier stages, then all work of this rank
  EXPECT_LT(bound.critical_path, bound.seconds);
  for (StageCost& cost : costs) cost.optimizer = 2;
  EXPECT_EQ(lower_bound({0, 1, 2, 3}, 10, costs).seconds, 2 + 10 * 7 + 2);
  // F and I of four stages, then W and the optimizer of the first one; or of rank 2: four F, two I, W and its
  // optimizer.
  EXPECT_EQ(lower_bound({0, 1, 2, 3}, 1, costs).critical_path, std::max(4 + 4 + 1 + 2, 4 + 2 + 5 + 2));
  costs[2].optimizer = 9;
  EXPECT_EQ(lower_bound({0, 1, 2, 3}, 1, costs).critical_path, 4 + 2 + 5 + 9) << "what ends on rank 2";
  for (StageCost& cost : costs) cost.optimizer = 0;
  EXPECT_EQ(lower_bound({0, 1, 2, 3}, 1, costs).rank, -1);  // with one micro-batch, its path is the bound
}

// Rank 0 has work for 5 x 5. Rank 1 has work for 5 x 4, and begins after 1 s of rank 0. Then rank 0 has 4 s
// left.
TEST(LowerBound, NamesTheBusiestOfTwoRanksThatReachIt) {
  std::vector<StageCost> costs(3);
  costs[0].backward_p2 = 3;
  costs[1].backward_p2 = costs[2].backward_p2 = 0;
  const LowerBound bound = lower_bound({0, 1, 1}, 5, costs);
  EXPECT_EQ(bound.seconds, 25);
  EXPECT_EQ(bound.rank, 0);
}

// With room for one micro-batch, the micro-batches go through one after the other.
TEST(LowerBound, MemoryBoundsTheThroughput) {
  EXPECT_EQ(bound_of(4, 6, 1),
            // Each micro-batch goes through and back. On rank 0, its W comes before the next F.
            6 * 2 * 4 + 5 + 1);
  EXPECT_GT(bound_of(8, 32, 3), bound_of(8, 32));
  EXPECT_EQ(bound_of(8, 32, 32), bound_of(8, 32));
}

// If W makes room between the layers of the next F, it counts as W before that F.
TEST(LowerBound, CountsLayersInTheThroughput) {
  std::vector<StageCost> costs(4);
  for (StageCost& cost : costs) {
    cost.layers = {{.p2_units = 1, .forward_held = 0.5, .p1_held = 0.5, .stash = 1},
                   {.backward_p2 = 0, .p2_units = 0, .forward_held = 0.5, .p1_held = -0.5}};
  }
  SimulationOptions options;
  // W of a micro-batch must run before the second layer of the next F.
  options.cap_per_rank.assign(4, 1.25);
  const Simulation simulation = simulate(make_schedule("naive", 4, 6, P2Policy::kEnd), costs, options);
  EXPECT_EQ(lower_bound({0, 1, 2, 3}, 6, costs, options).seconds, simulation.step_seconds);
  EXPECT_EQ(simulation.step_seconds, 6 * 2 * 4 + 5 + 1);
}

// A W that frees nothing need not run before the next F.
TEST(LowerBound, CountsOnlyIWithoutAStash) {
  std::vector<StageCost> costs(4);
  for (StageCost& cost : costs) cost.stash_bytes = 0;
  SimulationOptions options;
  options.cap_per_rank.assign(4, 1);
  EXPECT_EQ(lower_bound({0, 1, 2, 3}, 6, costs, options).seconds, 6 * 2 * 4 + 1);
}

TEST(LowerBound, IsNeverAboveTheProvenOptimum) {
  const auto all = solved_pipelines();
  ASSERT_GE(all.size(), 100U);
  int tight = 0, tight_capped = 0;
  double gaps = 0;
  for (const auto& [pipeline, number, optimum] : all) {
    const LowerBound bound =
        lower_bound(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, pipeline.options);
    EXPECT_LE(bound.seconds, optimum * (1 + 1e-12)) << "case " << number;
    SimulationOptions uncapped = pipeline.options;
    uncapped.cap_per_rank.clear();
    EXPECT_LE(lower_bound(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, uncapped).seconds,
              bound.seconds * (1 + 1e-12))
        << "case " << number;
    gaps += 1 - bound.seconds / optimum;
    if (bound.seconds < optimum * (1 - 1e-12)) continue;
    ++tight;
    tight_capped += pipeline.options.cap_per_rank.empty() ? 0 : 1;
  }
  // A bound that is less often tight proves fewer schedules optimal.
  EXPECT_GE(tight, 110) << "of " << all.size();
  EXPECT_GE(tight_capped, 48) << "of those with caps";
  EXPECT_LE(gaps / static_cast<double>(all.size()), 0.0277);
}

// A value that a schedule reaches is the optimum. In these cases it takes all of the bound to get there: caps
// that make F wait for I and W, seen from both ends of the step.
TEST(LowerBound, ReachesTheOptimumUnderCaps) {
  struct Case {
    double optimum;
    std::vector<double> caps;
    double message;
    std::vector<std::vector<double>> costs;  // by stage: F, I, W, activations, stash
  };
  const std::vector<Case> cases = {{35, {2, 5, 5}, 0, {{1, 1, 4, 1, 2}, {2, 2, 3, 2, 2}, {2, 2, 1, 2, 2}}},
                                   {36, {2, 5, 3}, 0, {{1, 2, 3, 1, 1}, {3, 2, 2, 1, 1}, {1, 2, 4, 2, 1}}},
                                   {37, {2, 5, 4}, 1, {{1, 3, 2, 1, 2}, {2, 1, 3, 1, 1}, {1, 1, 5, 1, 1}}},
                                   {38, {4, 5, 3}, 0, {{2, 3, 1, 2, 2}, {2, 2, 4, 1, 1}, {3, 2, 2, 2, 2}}},
                                   {38, {4, 5, 4}, 0, {{3, 2, 2, 2, 2}, {2, 2, 4, 2, 2}, {2, 2, 3, 1, 2}}},
                                   {40, {2, 3, 4}, 0, {{2, 3, 2, 1, 1}, {3, 2, 2, 1, 1}, {3, 1, 1, 2, 1}}},
                                   {41, {4, 3, 3}, 0, {{1, 1, 5, 2, 2}, {3, 2, 1, 1, 1}, {1, 3, 2, 1, 1}}},
                                   {42, {5, 4, 4}, 1, {{1, 3, 3, 2, 2}, {2, 1, 4, 1, 2}, {2, 1, 3, 2, 2}}}};
  for (const Case& each : cases) {
    Pipeline pipeline;
    pipeline.rank_of_stage = {0, 1, 2};
    pipeline.micro_batches = 4;
    pipeline.options.cap_per_rank = each.caps;
    pipeline.options.message_seconds = each.message;
    for (const auto& numbers : each.costs) {
      StageCost& cost = pipeline.costs.emplace_back();
      cost.forward = numbers[0];
      cost.backward_p1 = numbers[1];
      cost.backward_p2 = numbers[2];
      cost.activation_bytes = numbers[3];
      cost.stash_bytes = numbers[4];
    }
    EXPECT_EQ(lower_bound(pipeline.rank_of_stage, 4, pipeline.costs, pipeline.options).seconds, each.optimum);
    EXPECT_EQ(schedule_for(pipeline).seconds, each.optimum) << "a schedule proves it";
  }
}

// The test takes any order on any placement. The cap is the memory that the order held.
TEST(LowerBound, IsNeverAboveARandomSchedule) {
  Random random(11);
  for (int round = 0; round < 500; ++round) {
    const Schedule bare =
        random_schedule(random, random_int(random, 1, 6), random_int(random, 1, 7), random_int(random, 1, 4), true);
    std::vector<bool> used(bare.ranks.size(), false);
    for (const int rank : bare.rank_of_stage) used[rank] = true;
    if (std::find(used.begin(), used.end(), false) != used.end()) continue;  // a rank has no stage
    auto costs = random_costs(random, bare.stages, round % 3 != 0);
    if (round % 4 == 3) {
      Pipeline unequal{bare.rank_of_stage, bare.micro_batches, costs, {}};
      make_unequal(random, unequal);
      costs = unequal.costs;
    }
    SimulationOptions options;
    options.message_seconds = random_int(random, 0, 2);
    if (round % 5 == 0) options.message_holder = MessageHolder::kSender;
    Schedule schedule = bare;
    schedule.policy = round % 2 == 0 ? P2Policy::kPlaced : P2Policy::kFill;
    schedule = add_communication(std::move(schedule));
    Simulation simulation = simulate(schedule, costs, options);
    // With its own peaks as caps, W may run earlier, also between layers.
    for (const double room : {1.0, 0.9}) {
      options.cap_per_rank.clear();
      for (const auto& rank : simulation.ranks) options.cap_per_rank.push_back(room * rank.peak_bytes);
      simulation = simulate(schedule, costs, options);
      options.cap_per_rank.clear();
      for (const auto& rank : simulation.ranks) options.cap_per_rank.push_back(rank.peak_bytes);
      const LowerBound bound = lower_bound(bare.rank_of_stage, bare.micro_batches, costs, options);
      EXPECT_LE(bound.seconds, simulation.step_seconds * (1 + 1e-9)) << "round " << round;
    }
  }
}

// A stage does not hold a message after it sent it. It does hold a message that it received.
TEST(LowerBound, CountsMessagesOnTheRankThatHoldsThem) {
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
  SimulationOptions options;
  const Schedule schedule = make_schedule("1f1b", 2, 6, P2Policy::kEnd);
  for (const auto& rank : simulate(schedule, costs, options).ranks) {
    options.cap_per_rank.push_back(rank.peak_bytes);
  }
  // There is room for the extra micro-batch that 1f1b admits, so the caps cost no throughput.
  const LowerBound bound = lower_bound({0, 1}, 6, costs, options);
  EXPECT_EQ(bound.seconds, lower_bound({0, 1}, 6, costs).seconds);
  EXPECT_LE(bound.seconds, simulate(schedule, costs, options).step_seconds);
}

// There is room for two micro-batches only because each frees four bytes more than it took.
TEST(LowerBound, CountsTheDeficitOfInconsistentLayers) {
  std::vector<StageCost> costs(2);
  costs[0].layers = {{.p2_units = 1, .forward_held = 17, .p1_held = -16, .stash = 5}};
  SimulationOptions options;
  options.cap_per_rank = {30, 0};
  EXPECT_EQ(lower_bound({0, 1}, 2, costs, options).seconds, lower_bound({0, 1}, 2, costs).seconds);
  costs[0].layers[0].p1_held = -12;  // the bytes add up: the second F waits for the first I
  EXPECT_GT(lower_bound({0, 1}, 2, costs, options).seconds, lower_bound({0, 1}, 2, costs).seconds);
}

// On a rank with two stages, a micro-batch in the later stage also holds its share of the earlier stage.
TEST(LowerBound, CountsTheShareOfEarlierStagesOfTheRank) {
  std::vector<StageCost> costs(2);
  costs[0].activation_bytes = 3;
  SimulationOptions options;
  options.cap_per_rank = {4};
  // With one rank, running W before the next F costs nothing.
  EXPECT_EQ(lower_bound({0, 0}, 3, costs, options).seconds, 18);
  costs.resize(4);
  options.cap_per_rank = {4, 0};
  const LowerBound bound = lower_bound({0, 1, 1, 0}, 2, costs, options);
  // 3 + 1 bytes are held from the last F until its I, so the second micro-batch passes only after the first
  // is back.
  EXPECT_EQ(bound.seconds, 2 * 8 + 1);
}

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
