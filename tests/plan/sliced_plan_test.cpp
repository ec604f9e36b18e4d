// Slices in cost models and plans: against simulating every combination, memory, what the file can be, and
// the causes of idle time.
#include <algorithm>
#include <cmath>
#include <numeric>

#include <nlohmann/json.hpp>

#include "tests/plan/support.h"
#include "twobp/plan/candidates.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/plan/planner.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;

// The layers of model_of, also in slices: each slice has its own part of the costs, and the last one's I
// makes gradients for the others.
CostModel sliced_model(Random& random, int layers, const std::vector<int>& counts) {
  std::vector<TestKind> kinds(layers);
  for (TestKind& kind : kinds) {
    kind.forward = random_int(random, 1, 9);
    kind.backward_p1 = random_int(random, 1, 9);
    kind.backward_p2 = random_int(random, 0, 9);
    kind.held = random_int(random, 5, 20);
    kind.stash = random_int(random, 0, 5);
  }
  CostModel model = model_of(kinds);
  model.link_latency = 0.01;
  for (const int count : counts) {
    std::vector<int> lengths(count, 8);
    lengths[0] = 128 - 8 * (count - 1);
    model.slice_lengths.push_back(lengths);
    for (size_t i = 0; i < kinds.size(); ++i) {
      auto& slices = model.kinds[concat("kind", i)].in_slices.emplace_back(count);
      for (int slice = 0; slice < count; ++slice) {
        TestKind part = kinds[i];
        const double share = random_int(random, 1, 3) / (2.0 * count);
        for (double TestKind::*of : {&TestKind::forward, &TestKind::backward_p1, &TestKind::backward_p2,
                                     &TestKind::held, &TestKind::stash, &TestKind::output})
          part.*of *= share;
        for (const int size : model.micro_batch_sizes) {
          LayerCost& cost = slices[slice].emplace_back(layer_of(part, size));
          const double gradients = size * (slice + 1 == count ? count - 1.0 : -1.0);
          cost.p1_held += gradients;
          cost.p1_peak = std::max({0.0, cost.p1_peak, cost.p1_held});
        }
      }
    }
  }
  check_cost_model(model);
  return model;
}

PlanRequest small_request() {
  PlanRequest request;
  request.ranks = {2, 3};
  request.micro_batches = {1, 4};
  request.micro_batch_sizes = {1, 2};
  request.recompute = {"none"};
  request.top = 0;
  return request;
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
  PlanRequest request = small_request();
  request.recompute = {};
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

TEST(SlicedPlan, RanksAsSimulatingEverythingDoes) {
  Random random(52);
  for (int round = 0; round < 3; ++round) {
    const CostModel model = sliced_model(random, 6, {2, 4});
    PlanRequest request = small_request();
    std::vector<double> all;
    for (const std::string& name : planned_schedules()) {
      const NamedSchedule& named = named_schedule(name);
      for (const int ranks : request.ranks) {
        const int stages = ranks * usual_stages_per_rank(named.placement);
        if (stages > 6) continue;
        for (const int size : request.micro_batch_sizes) {
          for (const int slices : {1, 2, 4}) {
            const auto split =
                balanced_split(layer_seconds_at(model, size, slices), place_stages(named.placement, stages, ranks));
            const auto costs = stage_costs(model, split, size, slices);
            for (const int m : request.micro_batches) {
              if (!admits(name, stages, ranks, m, slices)) continue;
              for (const P2Policy policy : planned_policies(name)) {
                const Schedule schedule = make_schedule(name, stages, m, policy, ranks, slices);
                all.push_back(m * size / simulate(schedule, costs, simulation_options(model)).step_seconds);
              }
            }
          }
        }
      }
    }
    std::sort(all.rbegin(), all.rend());
    const PlanResult result = plan(model, request);
    ASSERT_EQ(result.best.size(), all.size());
    std::vector<double> planned;
    for (const PlanChoice& choice : result.best) planned.push_back(choice.samples_per_second());
    std::sort(planned.rbegin(), planned.rend());
    for (size_t i = 0; i < all.size(); ++i) EXPECT_DOUBLE_EQ(planned[i], all[i]) << i;
    // What is left out by its bound is not among the best.
    request.top = 5;
    const PlanResult few = plan(model, request);
    EXPECT_LT(few.simulated, few.combinations);
    double most = 0;
    for (const PlanChoice& choice : few.best) most = std::max(most, choice.samples_per_second());
    EXPECT_DOUBLE_EQ(most, all[0]);
    const Simulation again = simulate_choice(model, few.best[0]);
    EXPECT_EQ(again.step_seconds, few.best[0].step_seconds);
    EXPECT_EQ(peak_of(again), few.best[0].peak_bytes);
  }
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

TEST(SlicedPlan, KeepsTheMemoryAndNamesTheSmallest) {
  Random random(53);
  for (int round = 0; round < 4; ++round) {
    const CostModel model = sliced_model(random, 6, {2, 4});
    PlanRequest request = small_request();
    request.ranks = {2};
    request.slices = {2, 4};
    request.memory = 10;
    const PlanResult nothing = plan(model, request);
    EXPECT_TRUE(nothing.best.empty());
    ASSERT_TRUE(nothing.smallest.has_value());
    EXPECT_GT(nothing.smallest->slices, 1);
    for (const double times : {1.0, 1.1, 1.5}) {
      request.memory = times * nothing.smallest->peak_bytes;
      const PlanResult some = plan(model, request);
      ASSERT_FALSE(some.best.empty()) << times;
      for (const PlanChoice& choice : some.best) {
        EXPECT_LE(choice.peak_bytes, request.memory * (1 + 1e-9));
        EXPECT_LE(peak_of(simulate_choice(model, choice, request)), request.memory * (1 + 1e-9));
      }
    }
    request.memory = 0.98 * nothing.smallest->peak_bytes;
    EXPECT_TRUE(plan(model, request).best.empty()) << "a smaller configuration would have fitted";
  }
}

TEST(SlicedPlan, SearchesForMore) {
  Random random(54);
  int found = 0;
  for (int round = 0; round < 4; ++round) {
    const CostModel model = sliced_model(random, 6, {4});
    PlanRequest request = small_request();
    request.ranks = {3};
    request.slices = {4};
    request.top = 5;
    const PlanResult named = plan(model, request);
    request.memory = named.best[0].peak_bytes;
    request.search = true;
    for (const PlanChoice& choice : plan(model, request).best) {
      EXPECT_EQ(choice.slices, 4);
      EXPECT_LE(choice.peak_bytes, request.memory * (1 + 1e-9));
      if (!choice.found) continue;
      ++found;
      EXPECT_EQ(choice.found->slices, 4);
      EXPECT_EQ(simulate_choice(model, choice, request).step_seconds, choice.step_seconds);
    }
  }
  EXPECT_GT(found, 0);
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
