// Tests profiles of samples that cost unequally, and how the seconds of a step are divided among its micro-batches.
#include "twobp/pipeline/profile/profile.h"

#include <chrono>
#include <thread>

#include "tests/pipeline/support.h"

namespace twobp::TWOBP_FILE {
namespace {

// F of the probe sleeps for as many milliseconds as the first input says, I for twice as many.
Profile profile_of(double typical_cost, double typical_ms, double costly_cost, double costly_ms) {
  ModelSpec model = test::small_mlp(2);
  const auto hooks = test::insert_probe(model, 1);
  const auto sleep = [](const Context& context, double times) {
    const double ms = times * context.field("input").flatten()[0].item<double>();
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
  };
  hooks->forward = [=](const Context& context) { sleep(context, 1); };
  hooks->backward_p1 = [=](const Context& context) { sleep(context, 2); };
  const auto fields = [](double ms) {
    Fields all = test::random_fields(1);
    all["input"] = all["input"].clone();
    all["input"].flatten()[0].fill_(ms);
    return all;
  };
  ProfiledBatch batch(fields(typical_ms));
  batch.cost = typical_cost;
  if (costly_cost > typical_cost) {
    batch.costly = fields(costly_ms);
    batch.costly_cost = costly_cost;
  }
  return measure_profile(model, batch, 0);
}

// A sleep may last longer than asked for, never shorter.
TEST(Profile, IsALineThroughTwoMicroBatches) {
  const LayerCost probe = profile_of(0.5, 10, 2.5, 90).at("probe");
  EXPECT_NEAR(probe.forward_rise, 40e-3, 20e-3);
  EXPECT_NEAR(probe.backward_p1_rise, 80e-3, 20e-3);
  EXPECT_NEAR(probe.forward, 10e-3 + 0.5 * 40e-3, 20e-3) << "at the mean";
  EXPECT_EQ(probe.backward_p2_rise, 0);
}

TEST(Profile, HasNoRiseIfSamplesCostTheSame) {
  const LayerCost probe = profile_of(1, 1, 1, 50).at("probe");
  EXPECT_EQ(probe.forward_rise, 0);
  EXPECT_EQ(probe.backward_p1_rise, 0);
}

TEST(ProfileExchange, CarriesEveryNumber) {
  Profile sent = {{"a", {}}, {"b", {}}};
  double value = 1;
  for (auto& [kind, cost] : sent) {
    for (const auto number : kLayerNumbers) cost.*number = value++;
    cost.p2_units = static_cast<int>(value++);
  }
  Profile received = {{"a", {}}, {"b", {}}};
  unpack_profile(pack_profile(sent), received);
  for (const auto& [kind, cost] : sent) {
    for (const auto number : kLayerNumbers) EXPECT_EQ(received.at(kind).*number, cost.*number);
    EXPECT_EQ(received.at(kind).p2_units, cost.p2_units);
  }
}

// All micro-batches together take the seconds of the step.
TEST(MeasuredCosts, DivideAStepAsTheProfileDoes) {
  const std::vector<std::vector<LayerCost>> stages = {
      {{.forward = 1, .backward_p1 = 2, .forward_rise = 0.5, .backward_p1_rise = 1}}};
  StepReport report;
  report.ranks.resize(1);
  StageTimes& times = report.stages.emplace_back();
  times.micro_batches = 2;
  times.forward = 30;
  times.backward_p1 = 60;
  EXPECT_EQ(measured_costs(stages, {0}, report).at(0).forward, 15);
  const auto rows = measured_costs(stages, {0}, report, {1, 3});
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_DOUBLE_EQ(rows[0].forward, 30 * 1 / 3.);  // 1 and 2 s in the profile
  EXPECT_DOUBLE_EQ(rows[1].forward, 30 * 2 / 3.);
  EXPECT_DOUBLE_EQ(rows[0].backward_p1 + rows[1].backward_p1, 60);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
