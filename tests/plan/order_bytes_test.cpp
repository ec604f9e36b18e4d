// Tests the smallest memory that an order of F and I needs: no simulation needs less, and some need exactly
// that much.
#include <algorithm>

#include "tests/plan/pipelines.h"
#include "twobp/plan/memory/least_memory.h"
#include "twobp/plan/memory/stage_bytes.h"

namespace twobp::TWOBP_FILE {
namespace {

TEST(OrderBytes, NoSimulationNeedsLess) {
  Random random(31);
  int met = 0, cases = 0;
  for (int round = 0; round < 400; ++round) {
    const auto names = schedule_names();
    const std::string name = names[random_int(random, 0, static_cast<int>(names.size()) - 1)];
    const int ranks = random_int(random, 1, 4);
    const int stages = ranks * usual_stages_per_rank(named_schedule(name).placement);
    const int slices = round % 4 == 0 ? random_int(random, 2, 5) : 1;
    const int m = random_int(random, 1, slices > 1 ? 4 : 9);
    if (!admits(name, stages, ranks, m, slices)) continue;
    const OrderBytes order(make_schedule(name, stages, m, P2Policy::kOff, ranks, slices));
    auto costs = random_costs(random, stages, round % 2 == 0);
    if (slices > 1 && round % 8 != 0) costs = in_slices(random, costs, slices);
    const double least = order.least(costs);
    for (const P2Policy policy : policies_of(name)) {
      const Schedule schedule = make_schedule(name, stages, m, policy, ranks, slices);
      for (const double memory : {0.0, least, 1.5 * least}) {
        SimulationOptions options;
        options.message_holder = round % 3 == 0 ? MessageHolder::kSender : MessageHolder::kNobody;
        options.cap_per_rank = caps_for(memory, schedule.rank_of_stage, ranks, costs);
        const double peak = peak_of(simulate(schedule, costs, options));
        EXPECT_GE(peak, least * (1 - 1e-12))
            << name << ' ' << policy_name(policy) << ' ' << memory << ", slices " << slices;
        met += peak <= least * (1 + 1e-9) ? 1 : 0;
        ++cases;
      }
    }
  }
  EXPECT_GT(cases, 1000);
  EXPECT_GT(met, cases / 10) << "a bound that nothing meets leaves nothing out";
}

// These values are computed by hand. Rank r of 1F1B has at most 4 - r micro-batches between F and I. A V
// counts both stages of a rank.
TEST(OrderBytes, HasKnownValuesForOneFOneBAndAV) {
  const OrderBytes linear(make_schedule("1f1b", 4, 8, P2Policy::kFill));
  EXPECT_EQ(linear.in_flight(), (std::vector<int>{4, 3, 2, 1}));
  std::vector<StageCost> costs(4);
  EXPECT_EQ(linear.least(costs), 4);
  costs[3].fixed_bytes = 10;
  EXPECT_EQ(linear.least(costs), 11);
  costs[1].output_bytes = 0.5;  // also held at the end of F
  costs[1].fixed_bytes = 9;
  EXPECT_EQ(linear.least(costs), 12.5);
  const OrderBytes v(make_schedule("v-min", 8, 16, P2Policy::kPlaced, 4));
  EXPECT_LE(v.least(std::vector<StageCost>(8)), 4) << "2 floor((N + 4) / 3) of W's, so fewer of I's";
  EXPECT_GE(v.least(std::vector<StageCost>(8)), 2);
}

// One rank with two stages. Which stage runs next counts as much as what is held.
TEST(OrderBytes, CountsThePeakOfEachStage) {
  Schedule schedule = empty_schedule({0, 0}, 1);
  schedule.ranks[0] = {{Op::kForward, 0, 0}, {Op::kForward, 1, 0}, {Op::kBackward, 1, 0}, {Op::kBackward, 0, 0}};
  const OrderBytes order(schedule);
  std::vector<StageCost> costs(2);
  costs[0].layers = {{.p2_units = 1, .forward_peak = 20, .forward_held = 1, .p1_held = -1}};
  costs[1].layers = {{.p2_units = 1, .forward_peak = 4, .forward_held = 1, .p1_held = -1}};
  EXPECT_EQ(order.least(costs), 20);
  costs[1].layers[0].forward_peak = 30;
  EXPECT_EQ(order.least(costs), 1 + 30);
}

void expect_bytes(const StageBytes& bytes, double activation, double stash, double forward_peak, double p1_peak,
                  double p2_peak, int p2_units) {
  EXPECT_EQ(bytes.activation, activation);
  EXPECT_EQ(bytes.stash, stash);
  EXPECT_EQ(bytes.forward_peak, forward_peak);
  EXPECT_EQ(bytes.p1_peak, p1_peak);
  EXPECT_EQ(bytes.p2_peak, p2_peak);
  EXPECT_EQ(bytes.p2_units, p2_units);
  EXPECT_EQ(bytes.for_others, 0);
  EXPECT_EQ(bytes.deficit, 0);
}

// The middle of three stages receives 3 and 7, and sends 5 and 2.
TEST(StageBytes, AddUpTheMiddleOfAPipeline) {
  std::vector<StageCost> costs(3);
  costs[0].output_bytes = 3;
  costs[2].input_gradient_bytes = 7;
  StageCost& middle = costs[1];
  middle.output_bytes = 5;
  middle.input_gradient_bytes = 2;
  middle.activation_bytes = 20;
  middle.stash_bytes = 6;
  middle.p2_units = 2;
  expect_bytes(stage_bytes(costs, 3)[1], 20, 6, 20 + 5, 7, 0, 2);
  middle.stash_bytes = 30;
  expect_bytes(stage_bytes(costs, 3)[1], 20, 30, 20 + 5, 30 + 2 - 20, 0, 2);
  // F: 3 + 4 + 6 = 13, of which 5 are sent. Before the second layer there are 7, and its peak is 9.
  // I begins with 7 more, and leaves 2: 7 + 9 within the last layer, then 7 - 3, then 7 - 3 + 4.
  middle.layers = {
      {.p2_units = 1, .forward_peak = 1, .forward_held = 4, .p1_peak = 4, .p1_held = 4, .stash = 6, .p2_peak = 2},
      {.p2_units = 2, .forward_peak = 9, .forward_held = 6, .p1_peak = 9, .p1_held = -3, .stash = 8, .p2_peak = 1}};
  middle.layers[0].p1_held = 14 + 2 - 7 - 8 + 3;  // so that nothing but the stash of 14 and dL/dx are left
  expect_bytes(stage_bytes(costs, 3)[1], 8, 14, 7 + 9, 7 + 9, 2, 3);
  // A layer without W has no peak of one, and what a layer leaves counts if it names no peak.
  middle.layers[0].p2_units = 0;
  middle.layers[0].stash = 0;
  middle.layers[0].p1_held -= 6;
  middle.layers[1].forward_peak = middle.layers[1].p1_peak = 0;
  expect_bytes(stage_bytes(costs, 3)[1], 8, 8, 13, 7 - 3 + 4, 1, 2);
  // So does what I leaves: here a bigger stash and dL/dx, in place of the activations.
  middle.layers[1].stash = 20;
  middle.layers[0].p1_held += 12;
  expect_bytes(stage_bytes(costs, 3)[1], 8, 20, 13, 20 + 2 - 8, 1, 2);
}

// The ends: no input and no dL/dx at the first stage; at the last one, the output is the loss, which is
// freed.
TEST(StageBytes, AddUpTheEndsOfAPipeline) {
  std::vector<StageCost> costs(2);
  for (StageCost& cost : costs) {
    cost.output_bytes = 3;
    cost.input_gradient_bytes = 2;
    cost.activation_bytes = 10;
    cost.stash_bytes = 9;
  }
  expect_bytes(stage_bytes(costs, 2)[0], 10, 9, 10 + 3, 2, 0, 1);
  expect_bytes(stage_bytes(costs, 2)[1], 10, 9, 10, 9 - 10 + 2, 0, 1);
  for (StageCost& cost : costs)
    cost.layers = {{.p2_units = 1, .forward_peak = 9, .forward_held = 12, .p1_held = 1, .stash = 9}};
  costs[0].layers[0].p1_held = 9 - 9 - 2;
  costs[1].layers[0].p1_held = 9 + 2 - 12;
  expect_bytes(stage_bytes(costs, 2)[0], 12 - 3, 9, 12, 2, 0, 1);
  expect_bytes(stage_bytes(costs, 2)[1], 3 + 12 - 3, 9, 3 + 12, 0, 0, 1);
}

// The bytes of these layers do not add up: F leaves less than nothing, or W frees more than I left.
TEST(StageBytes, CountTheDeficitOfInconsistentLayers) {
  std::vector<StageCost> costs(1);
  costs[0].layers = {{.p2_units = 1, .forward_held = -3, .stash = 5}};
  EXPECT_EQ(stage_bytes(costs, 1)[0].deficit, 3 + 8);
  EXPECT_EQ(stage_bytes(costs, 1)[0].activation, 0);
  EXPECT_EQ(least_activation_bytes({0}, costs), std::vector<double>{-11});
  costs[0].layers = {{.p2_units = 1, .forward_held = 17, .p1_held = -16, .stash = 5}};
  EXPECT_EQ(stage_bytes(costs, 1)[0].deficit, 4);
  EXPECT_EQ(stage_bytes(costs, 1)[0].activation, 17);
  EXPECT_EQ(least_activation_bytes({0}, costs), std::vector<double>{13});
  costs[0].layers[0].p1_held = -12;
  EXPECT_EQ(stage_bytes(costs, 1)[0].deficit, 0);
}

// A micro-batch may free four bytes more than it took, so it and the previous one each count four bytes less.
TEST(OrderBytes, SubtractsTheDeficitOfInconsistentLayers) {
  std::vector<StageCost> costs(1);
  costs[0].fixed_bytes = 100;
  costs[0].layers = {{.p2_units = 1, .forward_peak = 20, .forward_held = 17, .p1_held = -16, .stash = 5}};
  const OrderBytes order(make_schedule("gpipe", 1, 2, P2Policy::kOff));
  EXPECT_EQ(order.least(costs), 100 + (17 - 4) + 20 - 4);
  EXPECT_LE(order.least(costs), peak_of(simulate(make_schedule("gpipe", 1, 2, P2Policy::kOff), costs)));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
