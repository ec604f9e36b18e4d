// Slices in cost models and plans, and what the file can be. planner_test plans in slices, too.
#include <numeric>

#include <nlohmann/json.hpp>

#include "tests/plan/support.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/planner.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;

CostModel sliced_model(Random& random, int layers, const std::vector<int>& counts) {
  CostModel model = random_model(random, layers);
  cut_into_slices(random, model, counts);
  return model;
}

TEST(SlicedCosts, AreThoseOfEachSliceAndStage) {
  Random random(50);
  const CostModel model = sliced_model(random, 5, {2, 4});
  const auto costs = stage_costs(model, {2, 3}, 2, 4);
  ASSERT_EQ(costs.size(), 8U);
  for (int slice = 0; slice < 4; ++slice) {
    const auto layers = slice_costs_at(model, 2, 4)[slice];
    EXPECT_DOUBLE_EQ(costs[2 * slice].forward, layers[0].forward + layers[1].forward);
    EXPECT_EQ(costs[2 * slice + 1].output_bytes, layers[4].output);
    EXPECT_EQ(costs[2 * slice].fixed_bytes, costs[0].fixed_bytes);
  }
  const std::vector<double> seconds = layer_seconds_at(model, 2, 4);
  double sum = 0;
  for (const StageCost& cost : costs) sum += cost.forward + cost.backward_p1 + cost.backward_p2;
  EXPECT_NEAR(std::accumulate(seconds.begin(), seconds.end(), 0.0), sum, 1e-9 * sum);
  EXPECT_EQ(slice_lengths(model, 4), (std::vector<int>{104, 8, 8, 8}));
  EXPECT_TRUE(slice_lengths(model, 1).empty());
  expect_contains(error_of([&] {
                    stage_costs(model, {2, 3}, 2, 3);
                  }),
                  {"no costs of 3 slices", "1, 2, 4", "--slices 3"});
  // Between sizes as for whole sequences.
  EXPECT_DOUBLE_EQ(slice_costs_at(model, 4, 2)[1][0].forward, 2 * slice_costs_at(model, 2, 2)[1][0].forward);
}

// What computes again is planned in slices where it was measured so.
TEST(SlicedCosts, RecomputationIsMeasured) {
  Random random(51);
  CostModel model = sliced_model(random, 4, {2});
  EXPECT_TRUE(has_slices(model, 2));
  EXPECT_FALSE(has_slices(with_recompute(model, "activations"), 2));
  for (const char* kind : {"kind1", "kind2"}) model.kinds[concat(kind, "+activations")] = model.kinds[kind];
  EXPECT_TRUE(has_slices(with_recompute(model, "activations"), 2));
  EXPECT_FALSE(has_slices(with_recompute(model, "both"), 2));
  PlanRequest request;
  request.ranks = {2, 3};
  request.micro_batches = {1, 4};
  request.micro_batch_sizes = {1, 2};
  request.top = 0;
  bool activations = false;
  for (const PlanChoice& choice : plan(model, request).best) {
    if (choice.slices == 1) continue;
    EXPECT_TRUE(choice.recompute == "none" || choice.recompute == "activations");
    activations |= choice.recompute == "activations";
  }
  EXPECT_TRUE(activations);
  request.recompute = {"both"};
  request.slices = {2};
  expect_contains(error_of([&] { plan(model, request); }), {"recomputation both", "2 slices"});
}

// One micro-batch, equal slices: more of them are faster and lighter.
TEST(SlicedPlan, FindsTheSmallBubble) {
  CostModel model = model_of(std::vector<TestKind>(4));
  for (const int count : {2, 8}) {
    model.slice_lengths.emplace_back(count, 64 / count);
    for (auto& [name, kind] : model.kinds) {
      const double part = 1.0 / count;
      const TestKind slice{part, part, part, 10 * part, 8 * part, 2 * part, 30};
      kind.in_slices.emplace_back(count, std::vector<LayerCost>{layer_of(slice, 1), layer_of(slice, 2)});
    }
  }
  PlanRequest request;
  request.ranks = {4};
  request.micro_batches = {1};
  request.micro_batch_sizes = {1};
  request.schedules = {"1f1b@off"};
  request.recompute = {"none"};
  const PlanResult result = plan(model, request);
  ASSERT_EQ(result.best.size(), 3U);
  EXPECT_EQ(result.best[0].slices, 8);
  for (const PlanChoice& choice : result.best) EXPECT_NEAR(choice.bubble, 3.0 / (choice.slices + 3), 1e-9);
  EXPECT_EQ(result.speed_up, 1);
  EXPECT_EQ(gain_text(result).rfind("2BP gains less than 1 %", 0), 0U);
  request.slices = {2};
  EXPECT_EQ(plan(model, request).best[0].slices, 2);
  request.slices = {3};
  expect_contains(error_of([&] { plan(model, request); }), {"no costs of 3 slices", "1, 2, 8"});
  request.slices = {0};
  expect_contains(error_of([&] { plan(model, request); }), {"number of slices", "at least 1"});
  request.slices = {2};
  request.micro_batches = {8};
  request.schedules = {"dualpipe-v"};
  request.ranks = {2};
  expect_contains(error_of([&] { plan(model, request); }), {"dualpipe-v", "no form with slices"});
}

TEST(SlicedCostsFile, RoundTripAndFaults) {
  Random random(55);
  CostModel model = sliced_model(random, 3, {2, 4});
  model.kinds["kind1+both"] = model.kinds["kind1"];
  model.kinds["kind1+both"].in_slices.clear();
  const std::string text = cost_model_to_json(model);
  const CostModel read = parse_cost_model(text, "costs.json");
  EXPECT_EQ(cost_model_to_json(read), text);
  EXPECT_EQ(read.slice_lengths, model.slice_lengths);
  EXPECT_EQ(slice_costs_at(read, 2, 4)[3][1].p1_held, slice_costs_at(model, 2, 4)[3][1].p1_held);
  const auto error_with = [&](const std::function<void(json&)>& change) {
    json file = json::parse(text);
    change(file);
    const std::string error = error_of([&] { parse_cost_model(file.dump(), "costs.json"); });
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    return error;
  };
  EXPECT_EQ(error_with([](json&) {}), "");
  expect_contains(error_with([](json& file) { file["slices"] = 3; }), {"costs.json", "slices: is not a list"});
  expect_contains(error_with([](json& file) { file["slices"][0] = 3; }), {"costs.json", "slices[0]: is not a list"});
  expect_contains(error_with([](json& file) { file["slices"][0] = {128}; }), {"costs.json", "kind", "slice"});
  expect_contains(error_with([](json& file) { file["slices"][0] = {64, 63}; }), {"128 positions", "127"});
  expect_contains(error_with([](json& file) { file["slices"][0] = {128, 0}; }), {"2 slices", "at least 1"});
  expect_contains(error_with([](json& file) { file["slices"][0] = {64, 32, 16, 16}; }), {"costs.json", "of 4"});
  expect_contains(error_with([](json& file) { file["kinds"]["kind1"]["slice_costs"].erase(1); }),
                  {"costs.json", "kind1", "1 entries", "slice_costs"});
  expect_contains(error_with([](json& file) { file["kinds"]["kind1"]["slice_costs"][1] = 4; }),
                  {"costs.json", "kinds.kind1.slice_costs[1]: is not a list"});
  expect_contains(error_with([](json& file) { file["kinds"]["kind1"]["slice_costs"][1][2] = {}; }),
                  {"costs.json", "kinds.kind1.slice_costs[1][2]: is not a list"});
  expect_contains(
      error_with([](json& file) { file["kinds"]["kind1"]["slice_costs"][1][2][0]["forward_seconds"] = -1; }),
      {"costs.json", "kinds.kind1.slice_costs[1][2][0].forward_seconds", "negative"});
  expect_contains(error_with([](json& file) {
                    json& cost = file["kinds"]["kind0"]["slice_costs"][1][2][0];
                    cost["p2_units"] = cost["p2_units"].get<int>() + 1;
                    cost["backward_p2_seconds"] = 1;
                  }),
                  {"costs.json", "kind0", "slice 2 of 4", "p2 units"});
  // A file of whole sequences, as before, and one without the slices of a kind.
  EXPECT_EQ(error_with([](json& file) {
              file.erase("slices");
              for (auto& kind : file["kinds"]) kind.erase("slice_costs");
            }),
            "");
  EXPECT_EQ(error_with([](json& file) { file["kinds"]["kind1"].erase("slice_costs"); }), "");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
