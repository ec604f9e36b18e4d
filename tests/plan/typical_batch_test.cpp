// Tests the micro-batches of a typical batch, and their costs in the simulation.
#include <algorithm>
#include <numeric>

#include "tests/plan/support.h"
#include "twobp/core/balanced_order.h"
#include "twobp/plan/cost_model.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

TEST(TypicalBatch, HasSamplesFromAllParts) {
  EXPECT_EQ(typical_batch({}, {2, 3, 1}), std::vector<double>()) << "all cost the same";
  EXPECT_EQ(typical_batch({0.5, 1.5}, {1, 1, 1}), std::vector<double>{1});
  EXPECT_EQ(typical_batch({0.5, 1.5}, {1, 2, 1}), (std::vector<double>{0.5, 1.5}));
  EXPECT_EQ(typical_batch({0.5, 1.5}, {1, 4, 1}), (std::vector<double>{0.5, 1.5, 1.5, 0.5})) << "rises and falls";
  EXPECT_EQ(typical_batch({0.5, 1.5}, {1, 2, 2}), (std::vector<double>{1, 1})) << "dear ones with cheap ones";
  EXPECT_EQ(typical_batch({0.2, 0.4, 1.6, 1.8}, {2, 2, 1}), (std::vector<double>{0.2, 1.8})) << "one of two replicas";
}

TEST(TypicalBatch, IsFastForMachinesOfManyRanks) {
  EXPECT_EQ(typical_batch({0.5, 1.5}, {1 << 20, 4, 1}).size(), 4U);
  EXPECT_EQ(typical_batch({0.5, 1.5}, {1, 1 << 14, 4}).size(), 1U << 14);
}

TEST(TypicalBatch, KeepsTheMean) {
  const std::vector<double> costs = {0.1, 0.1, 0.4, 0.4, 1, 1.5, 1.5, 3};
  for (const int micro_batches : {1, 2, 5, 16}) {
    for (const int size : {1, 3}) {
      const auto batch = typical_batch(costs, {1, micro_batches, size});
      ASSERT_EQ(batch.size(), static_cast<size_t>(micro_batches));
      EXPECT_NEAR(std::accumulate(batch.begin(), batch.end(), 0.), micro_batches, 1e-9);
    }
  }
}

// Long documents that are cut at the sequence's length have equal costs, whose means differ in the last
// digits.
TEST(SampleCosts, MayBeEqualForManySamples) {
  CostModel model = model_of({{}});
  for (int samples = 10; samples < 600; ++samples) {
    std::vector<double> costs(samples, 2.51);
    for (int i = 0; i < samples / 3; ++i) costs[i] = 0.1 + 1e-3 * i;
    double sum = 0;
    for (const double cost : costs) sum += cost;
    for (double& cost : costs) cost *= samples / sum;
    model.sample_costs = means_of_parts(costs, 64);
    EXPECT_NO_THROW(check_cost_model(model)) << samples;
  }
}

// F of the only layer takes 10 s, and 4 s more for each time the mean; I takes 20 s and W 5 s, always.
StageCost rising_stage() {
  return stage_of({{.forward = 10, .backward_p1 = 20, .backward_p2 = 5, .p2_units = 1, .stash = 3, .forward_rise = 4}});
}

TEST(CostsOfMicroBatches, FollowTheLine) {
  const auto rows = costs_of_micro_batches({rising_stage(), rising_stage()}, {0.5, 1, 2});
  ASSERT_EQ(rows.size(), 6U);
  EXPECT_EQ(rows[0].forward, 8);
  EXPECT_EQ(rows[1].forward, 8);
  EXPECT_EQ(rows[2].forward, 10);
  EXPECT_EQ(rows[4].forward, 14);
  for (const StageCost& row : rows) {
    EXPECT_EQ(row.backward_p1, 20);
    EXPECT_EQ(row.backward_p2, 5);
    EXPECT_EQ(row.stash_bytes, 3);
  }
  StageCost measured = rising_stage();
  measured.forward = 30;  // a real step's; the layers tell its parts
  EXPECT_EQ(costs_of_micro_batches({measured}, {2})[0].forward, 30 * 1.4);
  StageCost steep = rising_stage();
  steep.layers[0].forward_rise = 100;
  EXPECT_EQ(costs_of_micro_batches({steep}, {0.5})[0].forward, 0) << "never negative";
  const StageCost whole;  // without layers nothing is known
  EXPECT_EQ(costs_of_micro_batches({whole}, {3})[0].forward, whole.forward);
}

TEST(CostsOfMicroBatches, AreRowsForTheSimulation) {
  const std::vector<StageCost> one = {rising_stage()};
  EXPECT_EQ(costs_of_micro_batches(one, typical_batch({}, {1, 4, 1})).size(), 1U);
  const auto rows = costs_of_micro_batches(one, typical_batch({0.5, 1.5}, {1, 4, 1}));
  const Simulation simulation = simulate(make_schedule("1f1b", 1, 4, P2Policy::kOff), rows);
  EXPECT_EQ(simulation.step_seconds, 4 * (10 + 20 + 5));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
