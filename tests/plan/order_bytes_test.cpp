// Tests the smallest memory that an order of F and I needs: no simulation needs less, and some need exactly
// that much.
#include "twobp/plan/order_bytes.h"

#include <algorithm>

#include "tests/plan/pipelines.h"
#include "twobp/plan/adviser.h"

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

// The bytes of these layers do not add up: F leaves less than nothing, or W frees more than I left.
TEST(StageBytes, CountTheDeficitOfInconsistentLayers) {
  std::vector<StageCost> costs(1);
  costs[0].layers = {{.forward_held = -3, .stash = 5}};
  EXPECT_EQ(stage_bytes(costs, 1)[0].deficit, 3 + 8);
  EXPECT_EQ(stage_bytes(costs, 1)[0].activation, 0);
  EXPECT_EQ(least_activation_bytes({0}, costs), std::vector<double>{-11});
  costs[0].layers = {{.forward_held = 17, .p1_held = -16, .stash = 5}};
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
  costs[0].layers = {{.forward_peak = 20, .forward_held = 17, .p1_held = -16, .stash = 5}};
  const OrderBytes order(make_schedule("gpipe", 1, 2, P2Policy::kOff));
  EXPECT_EQ(order.least(costs), 100 + (17 - 4) + 20 - 4);
  EXPECT_LE(order.least(costs), peak_of(simulate(make_schedule("gpipe", 1, 2, P2Policy::kOff), costs)));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
