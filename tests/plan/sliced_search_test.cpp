// The auto-scheduler over slices of sequences, beyond auto_schedule_test, which also has slices: bytes, and known
// values.
#include "tests/plan/pipelines.h"
#include "twobp/plan/auto_schedule/problem.h"

namespace twobp::TWOBP_FILE {
namespace {

// One slice is the search of whole sequences, to the last op.
TEST(SearchOfSlices, OneCostForAllSlicesIsTheSameForEach) {
  Random random(42);
  for (int round = 0; round < 12; ++round) {
    Pipeline pipeline = random_pipeline(random, Placement::kLinear, 3, 2);
    pipeline.options = {};
    pipeline.slices = 3;
    const AutoSchedule one = schedule_for(pipeline);
    const std::vector<StageCost> stages = pipeline.costs;
    for (int slice = 1; slice < 3; ++slice) pipeline.costs.insert(pipeline.costs.end(), stages.begin(), stages.end());
    const AutoSchedule each = schedule_for(pipeline);
    EXPECT_EQ(one.schedule.ranks, each.schedule.ranks);
    EXPECT_EQ(one.seconds, each.seconds);
    EXPECT_EQ(one.bound, each.bound);
  }
}

// Gradients that a slice's I makes for earlier ones need room. Under every rule, list scheduling begins only
// what it can finish, up to the least cap that does.
TEST(SearchOfSlices, EveryRuleLeavesRoomForGradients) {
  Random random(45);
  const auto rules = greedy_rules(90, 1);
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const bool v = round % 2 == 1;
    const int ranks = random_int(random, 1, 3);
    const int stages = v ? 2 * ranks : ranks;
    Pipeline pipeline{
        place_stages(v ? Placement::kV : Placement::kLinear, stages, ranks), 4, {}, {}, random_int(random, 2, 4)};
    std::vector<double> need(ranks, 0);
    for (int i = 0; i < stages * pipeline.slices; ++i) {
      const double kept = random_int(random, 1, 4);
      const bool last = i / stages + 1 == pipeline.slices;
      const double gradients = 3;  // of the keys and values of a slice
      const double made = last ? gradients * (pipeline.slices - 1) : -gradients;
      StageCost& cost = pipeline.costs.emplace_back();
      cost.layers = {{.p2_units = 1, .forward_peak = kept, .forward_held = kept, .p1_held = made - kept}};
      cost.layers[0].p1_peak = std::max(0.0, cost.layers[0].p1_held);
      need[pipeline.rank_of_stage[i % stages]] += v ? kept + (last ? made : 0) : 0;
    }
    // One stage a rank: the least. A V: both stages' gradients at once, which is more than enough.
    pipeline.options.cap_per_rank =
        v ? need : least_activation_bytes(pipeline.rank_of_stage, pipeline.costs, pipeline.slices);
    for (double& cap : pipeline.options.cap_per_rank) cap += random_int(random, 0, 3);
    const PipelineProblem problem(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, pipeline.options,
                                  pipeline.slices);
    for (const GreedyRule& rule : rules) {
      const TaskOrder order = greedy_order(problem, rule);
      ASSERT_TRUE(problem.fits(order));
      const Simulation simulation =
          simulate(problem.to_schedule(order, P2Policy::kPlaced), pipeline.costs, pipeline.options);
      ASSERT_TRUE(within_caps(simulation, pipeline.options));
    }
  }
}

TEST(SearchOfSlices, NamesTheLeastBytes) {
  // One stage a rank; three slices of two bytes each, and one byte of gradients for each earlier one.
  Pipeline pipeline{{0, 1}, 2, {}, {}, 3};
  for (int i = 0; i < 6; ++i) {
    StageCost& cost = pipeline.costs.emplace_back();
    const int slice = i / 2;
    const double gradients = slice == 2 ? 2 : -1;
    cost.layers = {{.p2_units = 1, .forward_peak = 2, .forward_held = 2, .p1_peak = 4, .p1_held = gradients - 2}};
  }
  EXPECT_EQ(least_activation_bytes({0, 1}, pipeline.costs, 3), (std::vector<double>{6, 6}));
  pipeline.options.cap_per_rank = {100, 5};
  // The layer's I takes four bytes more while it runs.
  const std::string error = error_of([&] { schedule_for(pipeline); });
  expect_contains(error, {"rank 1", "5 bytes", "frugal one needs 10"});
  pipeline.options.cap_per_rank = {10, 10};
  check_promises(pipeline, schedule_for(pipeline));
}

// One micro-batch of equal slices: the last I of rank 0 comes N - 1 after the last F, then its k I and k W.
TEST(BoundOfSlices, IsReachedByEqualSlices) {
  for (const int ranks : {1, 2, 4}) {
    Pipeline pipeline{place_stages(Placement::kLinear, ranks, ranks), 1, std::vector<StageCost>(ranks), {}, 8};
    const AutoSchedule found = schedule_for(pipeline);
    EXPECT_EQ(found.seconds, 3 * 8 + 2 * (ranks - 1)) << ranks;
    EXPECT_EQ(found.bound, found.seconds) << ranks;
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
