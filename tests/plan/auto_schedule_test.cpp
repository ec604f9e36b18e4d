// Tests the auto-scheduler against optima that an exact solver proved and against the named schedules, and
// checks the promises about its schedules.
#include "twobp/plan/auto_schedule/auto_schedule.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <sys/wait.h>

#include "tests/every_way.h"
#include "tests/plan/pipelines.h"
#include "twobp/plan/auto_schedule/problem.h"

namespace twobp::TWOBP_FILE {
namespace {

TEST(AutoSchedule, EqualsTheProvenOptimum) {
  const auto all = solved_pipelines();
  ASSERT_GE(all.size(), 100U);
  int equal = 0;
  double gaps = 0;
  for (const auto& [pipeline, number, optimum] : all) {
    const AutoSchedule found = schedule_for(pipeline);
    check_promises(pipeline, found);
    EXPECT_GE(found.seconds, optimum * (1 - 1e-9)) << "case " << number;  // otherwise the solver has another model
    equal += found.seconds <= optimum * (1 + 1e-9) ? 1 : 0;
    gaps += found.seconds / optimum - 1;
  }
  const auto cases = static_cast<double>(all.size());
  std::printf("equal to the optimum in %d of %zu cases, mean gap %.4f%%\n", equal, all.size(), 100 * gaps / cases);
  EXPECT_GE(equal, 0.95 * cases);
}

// Of whole sequences, and of slices.
class AutoScheduleOf : public testing::TestWithParam<bool> {
 protected:
  static int random_slices(Random& random, int most) { return GetParam() ? random_int(random, 2, most) : 1; }
};
INSTANTIATE_TEST_SUITE_P(Sliced, AutoScheduleOf, testing::Bool());

TEST_P(AutoScheduleOf, IsNeverWorseThanTheBestNamedSchedule) {
  Random random(21);
  const std::vector<Placement> placements = {Placement::kLinear, Placement::kV, Placement::kLooped};
  int beaten = 0;
  int compared = 0;
  double gain = 0;
  const int rounds = test::rounds(GetParam() ? 240 : 600);
  for (int round = 0; round < rounds; ++round) {
    const int ranks = random_int(random, GetParam() ? 1 : 2, 6);
    const int micro_batches = random_int(random, 1, GetParam() ? 4 : 14);
    Pipeline pipeline = random_pipeline(random, placements.at(round % 3), ranks, micro_batches,
                                        /*layered=*/round % 4 == 3, random_slices(random, 6));
    if (round % 5 == 4) make_unequal(random, pipeline);
    SCOPED_TRACE(testing::Message() << "round " << round);
    const AutoSchedule found = schedule_for(pipeline);
    check_promises(pipeline, found);
    const std::optional<double> named = check_against_named(pipeline, found);
    if (!named) continue;
    ++compared;
    beaten += found.seconds < *named * (1 - 1e-9) ? 1 : 0;
    gain += *named / found.seconds;
  }
  std::printf("faster than the best named schedule in %d of %d, %.2f%% in the mean\n", beaten, compared,
              100 * (gain / compared - 1));
  EXPECT_GE(compared, GetParam() ? rounds * 5 / 8 : rounds * 5 / 6);
  EXPECT_GT(beaten, compared / 4);
}

// Any number of stages may lie on any rank, and the caps are the smallest possible. An order that hangs is
// easy to begin there.
TEST_P(AutoScheduleOf, FitsTheSmallestCapOnAnyPlacement) {
  Random random(22);
  for (int round = 0; round < test::rounds(200); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    Pipeline pipeline;
    const int ranks = random_int(random, 1, 4);
    const int stages = random_int(random, ranks, GetParam() ? 6 : 9);
    pipeline.slices = random_slices(random, 4);
    for (int stage = 0; stage < stages; ++stage)
      pipeline.rank_of_stage.push_back(stage < ranks ? stage : random_int(random, 0, ranks - 1));
    for (int i = 0; i < stages * pipeline.slices; ++i) {
      StageCost& cost = pipeline.costs.emplace_back();
      cost.forward = random_int(random, 0, 5);
      cost.backward_p1 = random_int(random, 0, 5);
      cost.backward_p2 = random_int(random, 0, 5);
      cost.activation_bytes = random_int(random, 0, 5);
      cost.stash_bytes = random_int(random, 0, 8);
    }
    std::shuffle(pipeline.rank_of_stage.begin(), pipeline.rank_of_stage.end(), random);
    pipeline.micro_batches = random_int(random, 1, GetParam() ? 4 : 7);
    pipeline.options.cap_per_rank = least_activation_bytes(pipeline.rank_of_stage, pipeline.costs, pipeline.slices);
    for (double& cap : pipeline.options.cap_per_rank) cap += random_int(random, 0, 1) * random_int(random, 0, 20);
    check_promises(pipeline, schedule_for(pipeline));
  }
}

TEST(AutoSchedule, RefusesACapBelowTheSmallest) {
  Pipeline pipeline{{0, 1, 1, 0}, 4, std::vector<StageCost>(4), {}};
  pipeline.costs[2].activation_bytes = 3.5;
  pipeline.options.cap_per_rank = {2, 4};
  expect_contains(error_of([&] { schedule_for(pipeline); }), {"rank 1", "cap", "4.5"});
  pipeline.options.cap_per_rank = {2, 4.5};
  EXPECT_EQ(error_of([&] { schedule_for(pipeline); }), "");
}

// The cap in the message is enough, to the last digit.
TEST(AutoSchedule, NamesTheLeastBytesExactly) {
  Pipeline pipeline{{0, 1}, 2, std::vector<StageCost>(2), {}};
  pipeline.costs[1].activation_bytes = 12345432123;
  pipeline.options.cap_per_rank = {10, 12345e6};
  const std::string error = error_of([&] { schedule_for(pipeline); });
  const std::string before = "frugal one needs ";
  ASSERT_NE(error.find(before), std::string::npos) << error;
  pipeline.options.cap_per_rank[1] = std::stod(error.substr(error.find(before) + before.size()));
  EXPECT_EQ(pipeline.options.cap_per_rank[1], 12345432123);
  EXPECT_EQ(error_of([&] { schedule_for(pipeline); }), "");
}

// Layers need bytes while they run, slices make gradients for others, and some costs give back more than they
// took, as some measured ones do.
TEST(AutoSchedule, TheCapThatItNamesIsEnough) {
  Random random(24);
  const std::vector<Placement> placements = {Placement::kLinear, Placement::kV, Placement::kLooped};
  for (int round = 0; round < test::rounds(200); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    Pipeline pipeline =
        random_pipeline(random, placements.at(round % 3), random_int(random, 1, 4), random_int(random, 1, 5),
                        /*layered=*/round % 4 != 0, random_int(random, 1, 4));
    for (StageCost& cost : pipeline.costs) {
      if (cost.layers.empty() || random_int(random, 0, 3) > 0) continue;
      cost.layers.front().p1_held -= random_real(random, 0, 1);
    }
    if (round % 5 == 4) make_unequal(random, pipeline);
    pipeline.options.cap_per_rank.assign(pipeline.ranks(), 1e-9);
    const std::string error = error_of([&] { schedule_for(pipeline); });
    const std::string before = "frugal one needs ";
    ASSERT_NE(error.find(before), std::string::npos) << error;
    const double least = std::stod(error.substr(error.find(before) + before.size()));
    pipeline.options.cap_per_rank.assign(pipeline.ranks(), least);
    check_promises(pipeline, schedule_for(pipeline));
  }
}

// The search needs the timeline of its own simulations, even if the caller's options leave it out.
TEST(AutoSchedule, IgnoresTheTimelineOption) {
  Pipeline pipeline{{0, 1, 2, 3}, 8, std::vector<StageCost>(4), {}};
  const AutoSchedule with = schedule_for(pipeline);
  pipeline.options.timeline = false;
  const AutoSchedule without = schedule_for(pipeline);
  EXPECT_EQ(with.schedule.ranks, without.schedule.ranks);
  EXPECT_EQ(with.seconds, without.seconds);
}

// A search knows the seconds of each micro-batch, not its bytes.
TEST(AutoSchedule, RefusesMicroBatchesOfUnequalBytes) {
  Pipeline pipeline{{0, 1}, 3, std::vector<StageCost>(6), {}};
  pipeline.costs[5].forward = 4;
  EXPECT_GT(schedule_for(pipeline).seconds, 0);
  pipeline.costs[5].stash_bytes = 2;
  expect_contains(error_of([&] { schedule_for(pipeline); }), {"micro-batch 2 in stage 1", "other bytes"});
  pipeline.costs.resize(4);
  expect_contains(error_of([&] { schedule_for(pipeline); }), {"2 stages", "6 for its 3 micro-batches, got 4"});
}

TEST(AutoSchedule, RefusesBadCosts) {
  Pipeline pipeline{{0, 1}, 4, std::vector<StageCost>(2), {}};
  for (const double bad : {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    Pipeline broken = pipeline;
    broken.costs[1].backward_p2 = bad;
    expect_contains(error_of([&] { schedule_for(broken); }), {"stage 1", "backward_p2"});
  }
  for (const auto& spoil : std::vector<std::function<void(StageCost&)>>{
           [](StageCost& cost) { cost.layers = {LayerCost{.p1_peak = std::nan("")}}; },
           [](StageCost& cost) { cost.layers = {LayerCost()}; },
           [](StageCost& cost) { cost.gradient_bytes = -1; },
           [](StageCost& cost) { cost.fixed_bytes = std::nan(""); },
       }) {
    Pipeline broken = pipeline;
    spoil(broken.costs[1]);
    expect_contains(error_of([&] { schedule_for(broken); }), {"stage 1"});
  }
  pipeline.costs.pop_back();
  expect_contains(error_of([&] { schedule_for(pipeline); }), {"2 stages"});
}

// This is the purpose of zero-bubble schedules. If there is room, and W is as long as F and I, only the start
// has a wait.
TEST(AutoSchedule, ClosesTheBubbleOfEqualStages) {
  const int ranks = 4;
  Pipeline pipeline{{0, 1, 2, 3, 3, 2, 1, 0}, 16, std::vector<StageCost>(8), {}};
  pipeline.options.cap_per_rank.assign(ranks, 2 * ranks);  // as much as 1f1b holds: 2 stages x 4
  const AutoSchedule found = schedule_for(pipeline);
  EXPECT_EQ(found.seconds, found.bound);
  EXPECT_EQ(found.seconds, 3 * 2 * 16 + ranks - 1);
  EXPECT_EQ(found.schedule.policy, P2Policy::kPlaced);
}

// Rank 0 may not begin the second micro-batch before the first one comes back to it, after 3 s on rank 1.
// Then it has work in every wait, if W of stage 0 is in pieces, and in no other case.
TEST(AutoSchedule, FillsWaitsWithPiecesOfW) {
  Pipeline pipeline{{0, 1, 1, 0}, 2, {}, {}};
  pipeline.costs = {{.forward = 2, .backward_p1 = 1, .backward_p2 = 3, .p2_units = 3},
                    {.forward = 1, .backward_p1 = 1, .backward_p2 = 0},
                    {.forward = 2, .backward_p1 = 3, .backward_p2 = 0},
                    {.forward = 1, .backward_p1 = 1, .backward_p2 = 3}};
  for (StageCost& cost : pipeline.costs) cost.stash_bytes = 0;
  pipeline.options.cap_per_rank = {2, 0};
  const AutoSchedule in_pieces = schedule_for(pipeline);
  EXPECT_EQ(in_pieces.seconds, 3 + 2 * (2 + 1 + 3 + 1 + 1 + 3));
  EXPECT_EQ(in_pieces.schedule.policy, P2Policy::kFill);
  pipeline.costs[0].p2_units = 1;
  EXPECT_GT(schedule_for(pipeline).seconds, in_pieces.seconds);
}

TEST(AutoSchedule, GivesTheSameScheduleForTheSameSeed) {
  Random random(23);
  Pipeline pipeline = random_pipeline(random, Placement::kV, 4, 8);
  pipeline.options.cap_per_rank = least_activation_bytes(pipeline.rank_of_stage, pipeline.costs);
  for (double& cap : pipeline.options.cap_per_rank) cap *= 2.5;
  const AutoSchedule one = schedule_for(pipeline);
  const AutoSchedule two = schedule_for(pipeline);
  EXPECT_GT(one.iterations, 100);  // the search ran
  EXPECT_EQ(one.schedule.ranks, two.schedule.ranks);
  EXPECT_EQ(one.iterations, two.iterations);
  EXPECT_EQ(one.method, two.method);
}

TEST(AutoSchedule, IsNotWorseWithMoreEffort) {
  Random random(24);
  for (int round = 0; round < test::rounds(6); ++round) {
    Pipeline pipeline = random_pipeline(random, Placement::kV, 3, 6);
    pipeline.options.cap_per_rank = least_activation_bytes(pipeline.rank_of_stage, pipeline.costs);
    for (double& cap : pipeline.options.cap_per_rank) cap *= 1.7;
    const AutoSchedule quick = schedule_for(pipeline, SearchEffort::kQuick);
    const AutoSchedule usual = schedule_for(pipeline, SearchEffort::kUsual);
    EXPECT_LE(usual.seconds, quick.seconds * 1.005) << "round " << round;
    check_promises(pipeline, usual);
  }
}

// There are bytes on the links and beside the activations, and shared links. The search approximates them,
// and the simulation decides.
TEST(AutoSchedule, CountsMessages) {
  Random random(25);
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    Pipeline pipeline = random_pipeline(random, round % 2 == 0 ? Placement::kLinear : Placement::kV, 4, 8);
    for (StageCost& cost : pipeline.costs) {
      cost.output_bytes = random_real(random, 0, 0.3);
      cost.input_gradient_bytes = random_real(random, 0, 0.3);
    }
    pipeline.options.bytes_per_second = 1;
    if (round % 4 < 2) pipeline.options.shared_links = node_links(4, 2, 0.1, 1);
    for (double& cap : pipeline.options.cap_per_rank) cap += 2;
    const AutoSchedule found = schedule_for(pipeline);
    check_promises(pipeline, found);
    if (const auto named = best_named(pipeline)) {
      EXPECT_LE(found.seconds, *named * (1 + 1e-11));
    }
  }
}

// The search measures time as the simulator does. Its result is never worse than its start.
TEST(LocalSearch, IsNeverWorseThanItsStart) {
  Random random(26);
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    Pipeline pipeline = random_pipeline(random, round % 2 == 0 ? Placement::kLinear : Placement::kV, 4, 6);
    for (StageCost& cost : pipeline.costs) cost.p2_units = 1;
    const PipelineProblem problem(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, pipeline.options);
    const auto rules = greedy_rules(round + 1, 1);
    const TaskOrder start = greedy_order(problem, rules.back());
    ASSERT_TRUE(problem.fits(start));
    const double seconds = order_seconds(problem, start);
    const auto simulated = [&](const TaskOrder& order) {
      return simulate(problem.to_schedule(order, P2Policy::kPlaced), pipeline.costs, pipeline.options).step_seconds;
    };
    EXPECT_NEAR(simulated(start), seconds, 1e-9 * seconds);
    const SearchResult found = improve_order(problem, start, 300, 0, 5);
    EXPECT_LE(found.seconds, seconds);
    EXPECT_TRUE(problem.fits(found.order));
    EXPECT_NEAR(simulated(found.order), found.seconds, 1e-9 * found.seconds);
  }
}

// From an order that is far from good (all F first), with no other start to fall back on.
TEST(LocalSearch, FindsNineOfTenOptimaFromAPoorStart) {
  int cases = 0, optimal = 0;
  double gaps = 0;
  for (const auto& [pipeline, number, optimum] : solved_pipelines()) {
    const PipelineProblem problem(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, pipeline.options);
    const TaskOrder start = greedy_order(problem, {.prefer = GreedyRule::Prefer::kForward, .in_flight = 0});
    const double seconds = order_seconds(problem, start);
    if (seconds <= optimum * (1 + 1e-9)) continue;
    const SearchResult found = improve_order(problem, start, 3000, 0, 1);
    EXPECT_LE(found.iterations, 3000);
    EXPECT_EQ(found.seconds, order_seconds(problem, found.order));
    EXPECT_EQ(improve_order(problem, start, 100, 0, 1).order.ranks,
              improve_order(problem, start, 100, 0, 1).order.ranks);
    EXPECT_EQ(improve_order(problem, start, 3000, seconds, 1).iterations, 0) << "it is good enough";
    ++cases;
    optimal += found.seconds <= optimum * (1 + 1e-9) ? 1 : 0;
    EXPECT_LT(found.seconds, seconds) << "case " << number;
    gaps += found.seconds / optimum - 1;
  }
  ASSERT_GE(cases, 50);
  EXPECT_GE(optimal, 0.9 * cases);
  EXPECT_LE(gaps / cases, 0.01);
}

TEST(AutoPlacement, ListsThePossiblePlacements) {
  EXPECT_EQ(possible_placements(4, 4), (std::vector<Placement>{Placement::kLinear}));
  EXPECT_EQ(possible_placements(8, 4), (std::vector<Placement>{Placement::kV, Placement::kLooped}));
  EXPECT_EQ(possible_placements(12, 4), (std::vector<Placement>{Placement::kLooped}));
  EXPECT_EQ(possible_placements(1, 1), (std::vector<Placement>{Placement::kLinear}));
  EXPECT_EQ(possible_placements(3, 1), (std::vector<Placement>{Placement::kLooped}));
  EXPECT_TRUE(possible_placements(5, 4).empty());
  EXPECT_TRUE(possible_placements(0, 1).empty());
  EXPECT_TRUE(possible_placements(1, 0).empty());
}

// The solver still finds the stored optima.
TEST(ExactSolver, AgreesWithTheStoredOptima) {
  const char* given = std::getenv("TWOBP_PYTHON");
  const std::string source = TWOBP_SOURCE_DIR;
  const std::string command = std::string(given != nullptr ? given : "python3") + " " + source +
                              "/tests/plan/optimal_schedules.py check " + source +
                              "/tests/golden/optimal_schedules.json 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string output;
  for (int c = fgetc(pipe); c != EOF; c = fgetc(pipe)) output += static_cast<char>(c);
  const int status = pclose(pipe);
  if (WIFEXITED(status) && (WEXITSTATUS(status) == 77 || WEXITSTATUS(status) == 127)) GTEST_SKIP() << output;
  EXPECT_EQ(status, 0) << output;
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
