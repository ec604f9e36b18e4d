// Tests a recorded order of ops that is simulated again.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/schedule/costs.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

// Replays the order of a simulation under the same options.
void expect_same_replay(const Schedule& schedule, const std::vector<StageCost>& costs, SimulationOptions options) {
  const Simulation first = simulate(schedule, costs, options);
  options.recorded = recorded_order(first);
  const Simulation again = simulate(schedule, costs, options);
  EXPECT_NEAR(again.step_seconds, first.step_seconds, 1e-9);
  ASSERT_EQ(again.ranks.size(), first.ranks.size());
  for (size_t rank = 0; rank < first.ranks.size(); ++rank) {
    EXPECT_NEAR(again.ranks[rank].peak_bytes, first.ranks[rank].peak_bytes, 1e-9);
    ASSERT_EQ(again.ranks[rank].timeline.size(), first.ranks[rank].timeline.size());
  }
}

TEST(Recorded, OrderOfASimulationGivesTheSameSimulation) {
  Random random(11);
  for (int round = 0; round < 200; ++round) {
    const int stages = random_int(random, 1, 5);
    const Schedule schedule =
        make_schedule("1f1b", stages, random_int(random, 1, 8), kPolicies[random_int(random, 0, 3)]);
    const auto costs = random_costs(random, stages, round % 4 < 2);
    SimulationOptions options;
    if (round % 2 == 0) options.cap_per_rank.assign(stages, random_int(random, 1, 6));
    SCOPED_TRACE(round);
    expect_same_replay(schedule, costs, options);
  }
}

// Also where ranks act in each other's memory or on a shared link, and must take turns in the order of time.
TEST(Recorded, OrderOfASimulationKeepsTheTurnsOfRanks) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    const int stages = random_int(random, 2, 4);
    const Schedule schedule =
        make_schedule("1f1b", stages, random_int(random, 1, 6), kPolicies[random_int(random, 0, 3)]);
    const auto costs = random_costs(random, stages, /*layered=*/true);
    SimulationOptions options;
    options.message_holder = MessageHolder::kSender;
    if (round % 2 == 1) options.shared_links = {{"out of rank 0 and 1", {{0, 1}, {1, 0}}, 0.1, 1}};
    SCOPED_TRACE(round);
    expect_same_replay(schedule, costs, options);
  }
}

TEST(Recorded, TheOrderDecidesInsteadOfFill) {
  // Under fill, rank 0 would run W in its wait. The record says that W ran after all I.
  const Schedule schedule = make_schedule("gpipe", 2, 2, P2Policy::kFill);
  SimulationOptions options;
  options.recorded = {{{Op::kForward, 0, 0},
                       {Op::kForward, 0, 1},
                       {Op::kBackwardP1, 0, 0},
                       {Op::kBackwardP1, 0, 1},
                       {Op::kBackwardP2, 0, 0},
                       {Op::kBackwardP2, 0, 1}},
                      {{Op::kForward, 1, 0},
                       {Op::kForward, 1, 1},
                       {Op::kBackwardP1, 1, 0},
                       {Op::kBackwardP2, 1, 0},
                       {Op::kBackwardP1, 1, 1},
                       {Op::kBackwardP2, 1, 1}}};
  const Simulation result = simulate(schedule, std::vector<StageCost>(2), options);
  EXPECT_EQ(result.ranks[1].timeline[3].op, Op::kBackwardP2);
  EXPECT_EQ(result.ranks[0].timeline[3].op, Op::kBackwardP1);
  EXPECT_EQ(result.step_seconds, 9);  // 1I1 is done at 6, 0I1 at 7, then two W follow
}

// I of three layers leaves 2 bytes of stash each, and there is room for two. So W of the last layer runs before I of
// the first layer.
TEST(Recorded, WMayRunInsideItsOwnI) {
  StageCost cost;
  cost.forward = cost.backward_p1 = cost.backward_p2 = 3;
  for (int i = 0; i < 3; ++i) {
    LayerCost layer;
    layer.forward = layer.backward_p1 = layer.backward_p2 = 1;
    layer.p2_units = 1;
    layer.forward_held = 1;
    layer.p1_held = 1;
    layer.stash = 2;
    cost.layers.push_back(layer);
  }
  Schedule schedule = empty_schedule({0}, 1);
  schedule.ranks[0] = {{Op::kForward, 0, 0}, {Op::kBackwardP1, 0, 0}, {Op::kBackwardP2, 0, 0}};
  SimulationOptions options;
  options.cap_per_rank = {5};
  const Simulation first = simulate(schedule, {cost}, options);
  const auto& timeline = first.ranks[0].timeline;
  std::string text;
  for (const auto& op : timeline) {
    text += to_string({op.op, op.stage, op.micro_batch}) + " " + std::to_string(static_cast<int>(op.end)) + " ";
  }
  EXPECT_EQ(text, "0F0 3 0I0 5 0W0 6 0I0 7 0W0 9 ");
  EXPECT_EQ(timeline[3].part, 1);
  EXPECT_EQ(first.ranks[0].peak_bytes, 5);
  options.recorded = recorded_order(first);
  const Simulation again = simulate(schedule, {cost}, options);
  ASSERT_EQ(again.ranks[0].timeline.size(), timeline.size());
  EXPECT_EQ(again.ranks[0].peak_bytes, 5);
}

TEST(Recorded, OrdersOfOtherSchedulesAreRefused) {
  const Schedule schedule = make_schedule("gpipe", 2, 2, P2Policy::kFill);
  const Simulation simulation = simulate(schedule, std::vector<StageCost>(2));
  const auto error = [&](const std::function<void(std::vector<std::vector<RecordedOp>>&)>& change) {
    SimulationOptions options;
    options.recorded = recorded_order(simulation);
    change(options.recorded);
    return error_of([&] { simulate(schedule, std::vector<StageCost>(2), options); });
  };
  EXPECT_EQ(error([](auto&) {}), "");
  expect_contains(error([](auto& order) { order.pop_back(); }), {"recorded order has 1 ranks", "has 2"});
  expect_contains(error([](auto& order) { order[1].clear(); }), {"rank 1 ends before 1F0"});
  expect_contains(error([](auto& order) { std::swap(order[0][0], order[0][1]); }),
                  {"has 0F1 where the schedule has 0F0"});
  expect_contains(error([](auto& order) { order[0][0].stage = 1; }), {"has 1F0"});
  expect_contains(error([](auto& order) { order[0][0].op = Op::kSendForward; }), {"only F, I, W and receives"});
  expect_contains(error([](auto& order) {
                    order[0].insert(order[0].begin(), {Op::kBackwardP2, 0, 1});
                  }),
                  {"has 0W1 before its I"});
  SimulationOptions options;
  options.timeline = false;
  const Simulation without = simulate(schedule, std::vector<StageCost>(2), options);
  EXPECT_THROW(recorded_order(without), Error);
}

TEST(Recorded, WKeepsItsSideOfARecordedReceive) {
  const Schedule schedule = make_schedule("gpipe", 2, 2, P2Policy::kFill);
  std::vector<StageCost> costs(2);
  costs[1].backward_p1 = 3;  // dL/dx arrives at 6 and 9
  SimulationOptions options;
  const std::vector<RecordedOp> last = {{Op::kForward, 1, 0},    {Op::kForward, 1, 1},    {Op::kBackwardP1, 1, 0},
                                        {Op::kBackwardP1, 1, 1}, {Op::kBackwardP2, 1, 0}, {Op::kBackwardP2, 1, 1}};
  options.recorded = {{{Op::kForward, 0, 0},
                       {Op::kForward, 0, 1},
                       {Op::kRecvBackward, 0, 0},
                       {Op::kBackwardP1, 0, 0},
                       {Op::kRecvBackward, 0, 1},
                       {Op::kBackwardP2, 0, 0},
                       {Op::kBackwardP1, 0, 1},
                       {Op::kBackwardP2, 0, 1}},
                      last};
  EXPECT_EQ(simulate(schedule, costs, options).ranks[0].timeline[3].begin, 9);  // for example, to make room
  std::swap(options.recorded[0][4], options.recorded[0][5]);
  EXPECT_EQ(simulate(schedule, costs, options).ranks[0].timeline[3].begin, 7);  // in the wait
}

// A W that is recorded before a message runs before it, even if the message has arrived already.
TEST(Recorded, WComesBeforeAMessageThatHasArrived) {
  const Schedule schedule = make_schedule("gpipe", 2, 2, P2Policy::kFill);
  std::vector<StageCost> costs(2);
  costs[0].backward_p1 = 5;  // the second gradient arrives long before
  SimulationOptions options;
  options.recorded = {{{Op::kForward, 0, 0},
                       {Op::kForward, 0, 1},
                       {Op::kRecvBackward, 0, 0},
                       {Op::kBackwardP1, 0, 0},
                       {Op::kBackwardP2, 0, 0},
                       {Op::kRecvBackward, 0, 1},
                       {Op::kBackwardP1, 0, 1},
                       {Op::kBackwardP2, 0, 1}},
                      {{Op::kForward, 1, 0},
                       {Op::kForward, 1, 1},
                       {Op::kBackwardP1, 1, 0},
                       {Op::kBackwardP1, 1, 1},
                       {Op::kBackwardP2, 1, 0},
                       {Op::kBackwardP2, 1, 1}}};
  const Simulation simulation = simulate(schedule, costs, options);
  const auto& timeline = simulation.ranks[0].timeline;
  ASSERT_EQ(timeline.size(), 6U);
  EXPECT_EQ(timeline[3].op, Op::kBackwardP2);
  EXPECT_EQ(timeline[3].begin, 9);  // two F until 2, dL/dx at 4, I until 9
  // The bytes show the order. A received message counts after the W before it.
  costs[0].stash_bytes = costs[0].activation_bytes = 0;
  costs[0].stash_bytes = 7;
  costs[1].input_gradient_bytes = 5;
  EXPECT_EQ(simulate(schedule, costs, options).ranks[0].peak_bytes, 7);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
