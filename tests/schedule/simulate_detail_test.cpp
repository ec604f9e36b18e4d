// Tests links, sums of gradients over replicas, causes of idle time, peaks and their times, and smallest caps, by hand.
// simulate_property_test compares times, peaks and causes with a second implementation.
#include <algorithm>
#include <cmath>
#include <functional>
#include <regex>
#include <string>

#include <gtest/gtest.h>

#include "tests/schedule/named.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

double of(const RankSimulation& rank, BubbleCause cause) {
  return rank.bubble[static_cast<int>(cause)];
}

TEST(Links, EachNodeHasOneLinkOut) {
  const auto links = node_links(4, 2, 0.25, 8);
  ASSERT_EQ(links.size(), 2U);
  EXPECT_EQ(links[0].name, "node 0");
  EXPECT_EQ(links[0].between, (std::vector<std::pair<int, int>>{{0, 2}, {0, 3}, {1, 2}, {1, 3}}));
  // Within a node, a pair has its own link. Between nodes, it uses the shared link.
  SimulationOptions options;
  options.shared_links = node_links(4, 2, 5, 0);
  options.message_seconds = 1;
  const Simulation result = simulate(make_forward_schedule({0, 1, 2, 3}, 1), std::vector<StageCost>(4), options);
  EXPECT_DOUBLE_EQ(result.step_seconds, 4 + 1 + 5 + 1);
}

TEST(Links, BadLinksAreRefused) {
  const Schedule schedule = make_forward_schedule({0, 1}, 1);
  const auto error = [&](const SharedLink& link, int times = 1) {
    SimulationOptions options;
    options.shared_links.assign(times, link);
    return error_of([&] { simulate(schedule, std::vector<StageCost>(2), options); });
  };
  expect_contains(error({"card", {{0, 2}}}),
                  {"shared link 'card'", "ranks 0 and 2", "two different ranks from 0 to 1"});
  expect_contains(error({"card", {{1, 1}}}), {"ranks 1 and 1"});
  expect_contains(error({"card", {{0, 1}, {0, 1}}}), {"names ranks 0 and 1 twice"});
  expect_contains(error({"card", {{0, 1}}}, 2), {"as shared link 'card' does"});
  expect_contains(error({"card", {}, -1, 0}), {"shared link 'card': latency is -1"});
  expect_contains(error({"card", {}, 0, std::nan("")}), {"bytes_per_second is nan"});
  SimulationOptions options;
  options.bytes_per_second = -2;
  expect_contains(error_of([&] { simulate(schedule, std::vector<StageCost>(2), options); }),
                  {"bytes_per_second is -2"});
}

TEST(DataParallel, SumsOverlapOrFollow) {
  // One rank has two stages. B is not split and runs in order, so W of stage 1 is done at 4 and W of stage 0 at 6.
  Schedule schedule = empty_schedule({0, 0}, 1);
  schedule.ranks[0] = {{Op::kForward, 0, 0}, {Op::kForward, 1, 0}, {Op::kBackward, 1, 0}, {Op::kBackward, 0, 0}};
  std::vector<StageCost> costs(2);
  for (auto& cost : costs) {
    cost.gradient_bytes = 12;
    cost.optimizer = 1;
  }
  SimulationOptions options;
  options.data_parallel = {.replicas = 4, .latency = 0.5, .bytes_per_second = 9, .overlap = true};
  // Each sum takes 2 x 3/4 x 12 / 9 + 0.5 = 2.5. They run from 4 to 6.5, and from 6.5 to 9.
  Simulation result = simulate(schedule, costs, options);
  EXPECT_DOUBLE_EQ(result.step_seconds, 9 + 2);
  EXPECT_DOUBLE_EQ(of(result.ranks[0], BubbleCause::kCommunication), 3);
  EXPECT_DOUBLE_EQ(result.ranks[0].busy, 8);
  options.data_parallel.overlap = false;  // the sums start after the last B, at 6
  EXPECT_DOUBLE_EQ(simulate(schedule, costs, options).step_seconds, 6 + 5 + 2);
  options.data_parallel.replicas = 1;
  EXPECT_DOUBLE_EQ(simulate(schedule, costs, options).step_seconds, 8);
  options.data_parallel.replicas = 0;
  EXPECT_THROW(simulate(schedule, costs, options), Error);
}

// F, I, W of 1, 1, 2. F and I send tokens before their work and after it, each time for 1.
TEST(Experts, FAndWRunWhileTheirTokensTravel) {
  const std::vector<StageCost> costs = {stage_of({{.forward = 1,
                                                   .backward_p1 = 1,
                                                   .backward_p2 = 2,
                                                   .p2_units = 1,
                                                   .forward_to_experts = 6,
                                                   .forward_from_experts = 6,
                                                   .p1_to_experts = 6,
                                                   .p1_from_experts = 6}})};
  SimulationOptions options;
  options.data_parallel = {.exchange_latency = 0.5, .exchange_bytes_per_second = 12};
  const auto idle = [](const Simulation& of) { return of.ranks[0].idle[static_cast<int>(IdleCause::kExperts)]; };
  // The first I sends at 3 and 5, and the second F at 3, behind it, and 6. W runs until 8.
  Simulation step = simulate(make_schedule("1f1b", 1, 2, P2Policy::kFill), costs, options);
  EXPECT_DOUBLE_EQ(step.step_seconds, 13);
  EXPECT_DOUBLE_EQ(step.ranks[0].exchanges, 8);
  EXPECT_DOUBLE_EQ(idle(step), 5);
  EXPECT_DOUBLE_EQ(of(step.ranks[0], BubbleCause::kCommunication), 5);
  ASSERT_EQ(step.ranks[0].timeline.size(), 6U);
  EXPECT_EQ(step.ranks[0].timeline[2].op, Op::kForward) << "within the first I";
  EXPECT_DOUBLE_EQ(step.ranks[0].timeline[2].begin, 5);
  EXPECT_EQ(step.ranks[0].timeline[3].op, Op::kBackwardP2) << "within the second F";
  EXPECT_DOUBLE_EQ(step.ranks[0].timeline[3].begin, 6);
  // As long as the replay of its order, and as the second F within the first.
  options.recorded = recorded_order(step);
  EXPECT_DOUBLE_EQ(simulate(make_schedule("1f1b", 1, 2, P2Policy::kFill), costs, options).step_seconds, 13);
  options.recorded.clear();
  EXPECT_DOUBLE_EQ(simulate(make_schedule("gpipe", 1, 2, P2Policy::kFill), costs, options).step_seconds, 13);
  step = simulate(make_schedule("1f1b", 1, 2, P2Policy::kOff), costs, options);
  EXPECT_DOUBLE_EQ(step.step_seconds, 16);
  EXPECT_DOUBLE_EQ(idle(step), 8);
  step = simulate(make_schedule("1f1b", 1, 1, P2Policy::kFill), costs, options);
  EXPECT_DOUBLE_EQ(idle(step), 4) << "no W exists while tokens travel";
  // What runs beside the tokens on their way there.
  std::vector<StageCost> shared = costs;
  shared[0].layers[0].beside_experts = 0.75;
  EXPECT_DOUBLE_EQ(idle(simulate(make_schedule("1f1b", 1, 1, P2Policy::kFill), shared, options)), 2.5);
  shared[0].layers[0].p1_to_experts = -1;
  EXPECT_THROW(simulate(make_schedule("1f1b", 1, 1, P2Policy::kFill), shared, options), Error);
}

TEST(Causes, AreKnownForABalancedPipeline) {
  // The schedule is 1f1b at N = M = 4 without messages, with p2 off. Rank r starts later by r and ends earlier by 2r.
  const Simulation off = simulate(make_schedule("1f1b", 4, 4, P2Policy::kOff), std::vector<StageCost>(4));
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(of(off.ranks[rank], BubbleCause::kStartUp), rank);
    EXPECT_EQ(of(off.ranks[rank], BubbleCause::kNothing), 2 * rank);
    EXPECT_EQ(of(off.ranks[rank], BubbleCause::kDependency), 9 - 3 * rank);
    EXPECT_EQ(of(off.ranks[rank], BubbleCause::kCommunication), 0);
    EXPECT_EQ(of(off.ranks[rank], BubbleCause::kImbalance), 0);
  }
  // If `end` holds back a pending W, the wait is a dependency. With `fill` there is none.
  const Simulation end = simulate(make_schedule("1f1b", 4, 4, P2Policy::kEnd), std::vector<StageCost>(4));
  EXPECT_EQ(of(end.ranks[0], BubbleCause::kDependency), 3);
  EXPECT_EQ(of(end.ranks[0], BubbleCause::kNothing), 3);
  const Simulation fill = simulate(make_schedule("1f1b", 4, 4, P2Policy::kFill), std::vector<StageCost>(4));
  for (const auto& rank : fill.ranks) EXPECT_EQ(of(rank, BubbleCause::kDependency), 0);
  EXPECT_EQ(bubble_cause_name(BubbleCause::kNothing), "nothing left to fill");
}

TEST(Peaks, SayWhenAndWhere) {
  const Simulation result = simulate(make_schedule("gpipe", 2, 3, P2Policy::kOff), std::vector<StageCost>(2));
  EXPECT_EQ(result.ranks[0].peak.bytes, 3);
  EXPECT_EQ(result.ranks[0].peak.seconds, 2);  // its third F begins
  EXPECT_EQ(result.ranks[0].peak.op, Op::kForward);
  EXPECT_EQ(result.ranks[0].peak.micro_batch, 2);
  EXPECT_EQ(result.stage_peaks[1].seconds, 3);
  EXPECT_EQ(result.stage_peaks[1].stage, 1);
}

// An evaluation keeps nothing of a micro-batch.
TEST(Peaks, ForwardAloneHasOneInFlight) {
  for (const RankSimulation& rank : simulate(make_forward_schedule({0, 1}, 5), std::vector<StageCost>(2)).ranks)
    EXPECT_EQ(rank.peak_in_flight, 1);
}

TEST(Peaks, FixedBytesAreSeparate) {
  std::vector<StageCost> costs(2);
  costs[0].fixed_bytes = 10;
  costs[1].fixed_bytes = 5;
  Schedule schedule = looped_gpipe({0, 0}, 1);
  const Simulation result = simulate(schedule, costs);
  EXPECT_EQ(result.ranks[0].fixed_bytes, 15);
  EXPECT_EQ(result.ranks[0].total_peak_bytes(), 15 + 2);
}

// The update takes its memory when the activations are gone. The stages update one after the other.
TEST(Peaks, BytesOfTheUpdateReplaceActivations) {
  std::vector<StageCost> costs(2);
  costs[0].fixed_bytes = 10;
  costs[0].update_bytes = 1;
  Schedule schedule = looped_gpipe({0, 0}, 1);
  EXPECT_EQ(simulate(schedule, costs).ranks[0].total_peak_bytes(), 10 + 2);
  costs[1].update_bytes = 7;
  EXPECT_EQ(simulate(schedule, costs).ranks[0].total_peak_bytes(), 10 + 7);
}

// Makes messages of every size, peaks within layers, and sizes that differ only beyond six digits.
std::vector<StageCost> costs_to_cap(Random& random, int stages, bool layers, bool p2_peaks) {
  const double unit = random_int(random, 0, 1) == 0 ? 1 : 1234567.25;
  const auto bytes = [&](int low, int high) { return unit * random_int(random, low, high); };
  std::vector<StageCost> costs(stages);
  for (auto& cost : costs) {
    cost.activation_bytes = bytes(1, 6);
    cost.stash_bytes = bytes(0, 6);
    cost.p2_units = random_int(random, 1, 3);
    cost.output_bytes = bytes(0, 4);
    cost.input_gradient_bytes = bytes(0, 4);
    for (int i = layers ? random_int(random, 1, 3) : 0; i > 0; --i) {
      LayerCost layer;
      layer.forward = layer.backward_p1 = layer.backward_p2 = 1;
      layer.forward_held = bytes(0, 5);
      layer.forward_peak = layer.forward_held + bytes(0, 3);
      layer.p1_held = bytes(-4, 3);
      layer.p1_peak = bytes(0, 6);
      layer.stash = bytes(0, 5);
      layer.p2_peak = p2_peaks ? bytes(0, 3) : 0;
      layer.p2_units = random_int(random, 1, 3);
      cost.layers.push_back(layer);
    }
  }
  return costs;
}

// Returns the number in "(123 bytes)" before `what` in the message.
double bytes_before(const std::string& message, const std::string& what) {
  std::smatch found;
  if (!std::regex_search(message, found, std::regex("\\((\\d+) bytes\\)" + what))) return 0;
  return std::stod(found[1]);
}

TEST(Caps, TheSmallestIsJustEnough) {
  Random random(12);
  for (int round = 0; round < 600; ++round) {
    const Schedule schedule = random_named_schedule(random, 5, 10);
    SCOPED_TRACE(testing::Message() << "round " << round << " " << schedule.name << " p2 "
                                    << policy_name(schedule.policy));
    const auto costs = costs_to_cap(random, schedule.stages, round % 2 == 0, round % 4 == 0);
    SimulationOptions options;
    options.reject_over_cap = true;
    options.cap_per_rank = smallest_caps(schedule, costs);
    const auto error = [&] { return error_of([&] { simulate(schedule, costs, options); }); };
    EXPECT_EQ(error(), "");
    if (round % 4 == 0) continue;  // if W needs bytes itself, running it first is not always best
    const auto smallest = options.cap_per_rank;
    const int rank = random_int(random, 0, schedule.rank_count() - 1);
    if (smallest[rank] == 0) continue;  // a cap of 0 is none
    options.cap_per_rank[rank] = smallest[rank] * 0.99;
    const std::string message = error();
    expect_contains(message, {"does not fit: rank " + std::to_string(rank) + " holds"});
    // The cap in the message is enough, and it is the next whole number.
    const double said = bytes_before(message, " on this rank");
    EXPECT_EQ(said, std::ceil(smallest[rank]));
    options.cap_per_rank[rank] = said;
    EXPECT_EQ(error(), "");
    options.cap_per_rank.assign(smallest.size(), bytes_before(message, " on the fullest"));
    EXPECT_EQ(error(), "");
  }
}

// Room for a message is made before it arrives. W0 runs, although F2 fits beside its stash.
TEST(Caps, AMessageNeedsRoomToo) {
  std::vector<StageCost> costs(3);
  for (auto& cost : costs) {
    cost.activation_bytes = 4;
    cost.stash_bytes = 2;
    cost.output_bytes = 1;
    cost.input_gradient_bytes = 3;
  }
  const Schedule schedule = make_schedule("1f1b", 3, 4, P2Policy::kEnd);
  SimulationOptions options;
  options.cap_per_rank = smallest_caps(schedule, costs);
  EXPECT_EQ(options.cap_per_rank[1], 11);
  const Simulation result = simulate(schedule, costs, options);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_LE(result.ranks[rank].peak_bytes, options.cap_per_rank[rank]);
  }
}

TEST(Costs, AllowZeroAndNameWhatTheyRefuse) {
  const Schedule schedule = make_schedule("1f1b", 2, 2, P2Policy::kFill);
  StageCost nothing;
  nothing.forward = nothing.backward_p1 = nothing.backward_p2 = 0;
  nothing.activation_bytes = nothing.stash_bytes = 0;
  const Simulation result = simulate(schedule, {nothing, nothing});
  EXPECT_EQ(result.step_seconds, 0);
  EXPECT_EQ(result.bubble_ratio(), 0);
  const auto error = [&](const std::function<void(StageCost&)>& change) {
    std::vector<StageCost> costs(2);
    costs[1].layers.assign(2, {.p2_units = 1});
    change(costs[1]);
    return error_of([&] { simulate(schedule, costs); });
  };
  EXPECT_EQ(error([](StageCost&) {}), "");
  expect_contains(error([](StageCost& c) { c.layers[0].p2_units = -1; }), {"p2_units is -1"});
  expect_contains(error([](StageCost& c) { c.layers[0].p2_units = c.layers[1].p2_units = 0; }),
                  {"stage 1: backward_p2 is 1, but none of its layers has a W"});
}

// What F and I leave may be negative. Nothing else may.
TEST(SimulateDetail, RefusesEveryImpossibleNumber) {
  const Schedule schedule = make_schedule("1f1b", 1, 1, P2Policy::kOff);
  const auto expect_refused = [&](const StageCost& cost, const std::string& where, const std::string& name) {
    expect_contains(error_of([&] { simulate(schedule, {cost}); }), {where, concat(": ", name, " is ")});
  };
  const std::vector<std::pair<double StageCost::*, std::string>> of_stage = {
      {&StageCost::forward, "forward"},
      {&StageCost::backward_p1, "backward_p1"},
      {&StageCost::backward_p2, "backward_p2"},
      {&StageCost::optimizer, "optimizer"},
      {&StageCost::output_bytes, "output_bytes"},
      {&StageCost::input_gradient_bytes, "input_gradient_bytes"},
      {&StageCost::gradient_bytes, "gradient_bytes"},
      {&StageCost::fixed_bytes, "fixed_bytes"},
      {&StageCost::update_bytes, "update_bytes"},
      {&StageCost::activation_bytes, "activation_bytes"},
      {&StageCost::stash_bytes, "stash_bytes"}};
  const std::vector<std::pair<double LayerCost::*, std::string>> of_layer = {
      {&LayerCost::forward, "forward"},         {&LayerCost::backward_p1, "backward_p1"},
      {&LayerCost::backward_p2, "backward_p2"}, {&LayerCost::forward_peak, "forward_peak"},
      {&LayerCost::p1_peak, "p1_peak"},         {&LayerCost::stash, "stash"},
      {&LayerCost::p2_peak, "p2_peak"},         {&LayerCost::gradient_bytes, "gradient_bytes"}};
  for (const double bad : {-1.0, 2e18, std::nan("")}) {
    for (const auto& [number, name] : of_stage) {
      StageCost cost;
      cost.*number = bad;
      expect_refused(cost, "stage 0", name);
    }
    for (const auto& [number, name] : of_layer) {
      StageCost cost;
      cost.layers = {{.p2_units = 1}};
      cost.layers[0].*number = bad;
      expect_refused(cost, "layer 0 of stage 0", name);
    }
  }
  for (const auto& [number, name] :
       {std::pair{&LayerCost::forward_held, "forward_held"}, {&LayerCost::p1_held, "p1_held"}}) {
    StageCost cost;
    cost.layers = {{.p2_units = 1}};
    cost.layers[0].*number = -1;
    EXPECT_EQ(error_of([&] { simulate(schedule, {cost}); }), "");
    for (const double bad : {-2e18, 2e18, std::nan("")}) {
      cost.layers[0].*number = bad;
      expect_refused(cost, "layer 0 of stage 0", name);
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
