// Where sequences are cut, and what slices at other cuts are expected to cost.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/pipeline/profile/slices.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

// A layer whose positions cost (a + b x) seconds in F, twice that in I, and a in W.
LayerCost cost_of(int64_t begin, int64_t end, double a, double b) {
  const auto p = static_cast<double>(begin), q = static_cast<double>(end);
  LayerCost cost;
  cost.forward = a * (q - p) + b * (q * q - p * p) / 2;
  cost.backward_p1 = 2 * cost.forward;
  cost.backward_p2 = a * (q - p);
  cost.p2_units = 3;
  return cost;
}

// Two layers of one kind and one of another.
ModelSpec two_kinds() {
  ModelSpec model;
  for (const char* kind : {"attention", "attention", "head"}) {
    LayerSpec& layer = model.layers.emplace_back();
    layer.kind = layer.name = kind;
  }
  return model;
}

SliceProfiles slices_at(const Cuts& cuts) {
  SliceProfiles slices{cuts, {}};
  for (size_t s = 0; s + 1 < cuts.size(); ++s) {
    slices.profiles.push_back(
        {{"attention", cost_of(cuts[s], cuts[s + 1], 1e-3, 2e-6)}, {"head", cost_of(cuts[s], cuts[s + 1], 4e-3, 0)}});
  }
  return slices;
}

std::vector<double> seconds_of(const ModelSpec& model, const SliceProfiles& slices) {
  std::vector<double> seconds;
  for (const Profile& profile : slices.profiles) {
    double& sum = seconds.emplace_back(0);
    for (const LayerCost& layer : layer_costs(model, profile)) sum += layer.seconds();
  }
  return seconds;
}

TEST(SliceCuts, EachSliceCostsAFactorMoreThanThePrevious) {
  const ModelSpec model = two_kinds();
  const SliceProfiles measured = slices_at(equal_cuts(4096, 8));
  for (const double growth : {0.9, 1.0, 1.08}) {
    const Cuts cuts = growing_cuts(model, measured, growth);
    ASSERT_EQ(cuts.size(), 9u);
    EXPECT_EQ(cuts.back(), 4096);
    const std::vector<double> seconds = seconds_of(model, slices_at(cuts));
    for (size_t s = 1; s < seconds.size(); ++s) {
      EXPECT_EQ(cuts[s] % kSliceBlock, 0);
      // Half a block at both ends of slices of 400 to 700 positions.
      EXPECT_NEAR(seconds[s] / seconds[s - 1], growth, 0.04) << "slice " << s;
    }
  }
  const Cuts equal = growing_cuts(model, measured, 1);
  EXPECT_LT(equal[8] - equal[7], equal[1]);  // later positions cost more
}

// The last slice counts `last` times: other stages wait for it.
StepSeconds step_of(const ModelSpec& model, double last) {
  return [&model, last](const SliceProfiles& slices) {
    const std::vector<double> seconds = seconds_of(model, slices);
    double sum = (last - 1) * seconds.back();
    for (const double one : seconds) sum += one;
    return sum;
  };
}

TEST(SliceCuts, HaveEqualLengthsUnlessOthersGain) {
  const ModelSpec model = two_kinds();
  const SliceProfiles measured = slices_at(equal_cuts(4096, 8));
  EXPECT_EQ(fastest_cuts(model, measured, step_of(model, 1)), measured.cuts);
  EXPECT_EQ(fastest_cuts(model, measured, step_of(model, 3)), growing_cuts(model, measured, 0.84))
      << "the shortest last slice";
  // Now that slice is worth less than 2 % of the step.
  const StepSeconds step = step_of(model, 1.1);
  const double gain = step(measured) / step(slices_at(growing_cuts(model, measured, 0.84)));
  ASSERT_GT(gain, 1);
  ASSERT_LT(gain, 1.02);
  EXPECT_EQ(fastest_cuts(model, measured, step), measured.cuts);
}

TEST(SliceCuts, OtherCutsAreExpectedToCostWhatTheyCost) {
  const ModelSpec model = two_kinds();
  const Cuts cuts = {0, 64, 512, 520, 1600, 2048};
  const SliceProfiles expected = expected_slices(slices_at(equal_cuts(2048, 4)), cuts);
  const SliceProfiles actual = slices_at(cuts);
  ASSERT_EQ(expected.cuts, cuts);
  ASSERT_EQ(expected.profiles.size(), actual.profiles.size());
  for (size_t s = 0; s < actual.profiles.size(); ++s) {
    for (const auto& [kind, cost] : actual.profiles[s]) {
      const LayerCost& found = expected.profiles[s].at(kind);
      EXPECT_NEAR(found.forward, cost.forward, 1e-9) << kind << ", slice " << s;
      EXPECT_NEAR(found.backward_p1, cost.backward_p1, 1e-9) << kind << ", slice " << s;
      EXPECT_NEAR(found.backward_p2, cost.backward_p2, 1e-9) << kind << ", slice " << s;
      EXPECT_EQ(found.p2_units, 3);
    }
  }
}

TEST(SliceCuts, KeepTheirProportionsInOtherSequences) {
  EXPECT_EQ(scaled_cuts({0, 64, 128}, 256), (Cuts{0, 128, 256}));
  EXPECT_EQ(scaled_cuts({0, 8, 128}, 32), (Cuts{0, 8, 32}));   // no slice is empty
  EXPECT_EQ(scaled_cuts({0, 64, 128}, 15), (Cuts{0, 8, 15}));  // fewer blocks than slices
  EXPECT_EQ(scaled_cuts({0, 64, 120, 128}, 3), (Cuts{0, 1, 2, 3}));
  expect_error([] { scaled_cuts({0, 64, 120, 128}, 2); }, {"a sequence of 2 positions", "use at most 2 slices"});
}

TEST(SliceCuts, RefuseMoreSlicesThanBlocks) {
  expect_error([] { equal_cuts(31, 4); }, {"pipeline.slices is 4", "has 3 blocks of 8", "use at most 3 slices"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
