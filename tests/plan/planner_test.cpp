// Tests the planner against the simulation of every combination, with memory limits that exclude some or all
// combinations, and with impossible requests.
#include "twobp/plan/planner.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "tests/plan/support.h"
#include "twobp/core/recompute_mode.h"
#include "twobp/core/text.h"
#include "twobp/plan/candidates.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
namespace {

// Samples cost from a quarter of the mean to twice it, and up to all of F and I rises with that.
void make_unequal(Random& random, CostModel& model) {
  model.sample_costs = {0.25, 0.5, 1.25, 2};
  for (auto& [name, kind] : model.kinds) {
    const double part = 0.1 * random_int(random, 0, 10);
    for (LayerCost& cost : kind.at_size) {
      cost.forward_rise = part * cost.forward;
      cost.backward_p1_rise = part * cost.backward_p1;
    }
  }
}

PlanRequest small_request() {
  PlanRequest request;
  request.ranks = {2, 3};
  request.micro_batches = {2, 6};
  request.micro_batch_sizes = {1, 3};
  request.top = 7;
  return request;
}

// The request has one shape, and exactly the memory that the best named schedule needs.
PlanRequest request_to_search(const CostModel& model) {
  PlanRequest request = small_request();
  request.ranks = {3};
  request.recompute = {"none"};
  request.memory = plan(model, request).best[0].peak_bytes;
  return request;
}

// Returns the throughputs of all combinations, best first. Each schedule is made and simulated here.
std::vector<double> by_brute_force(const CostModel& model, const PlanRequest& request) {
  std::vector<double> all;
  const auto add = [&](const std::string& name, int ranks, const CostModel& costing, int size, int slices) {
    const NamedSchedule& named = named_schedule(name);
    const int stages = ranks * usual_stages_per_rank(named.placement);
    if (stages > static_cast<int>(model.layers.size())) return;
    std::vector<double> seconds(model.layers.size(), 0);
    for (const auto& layers : slice_costs_at(costing, size, slices)) {
      for (size_t i = 0; i < layers.size(); ++i) seconds[i] += layers[i].seconds();
    }
    const auto split = balanced_split(seconds, place_stages(named.placement, stages, ranks));
    for (const int m : request.micro_batches) {
      const auto costs = costs_of_micro_batches(stage_costs(costing, split, size, slices),
                                                typical_batch(model.sample_costs, {1, m, size}));
      for (const P2Policy policy : planned_policies(name)) {
        Schedule schedule;
        if (!error_of([&] { schedule = make_schedule(name, stages, m, policy, ranks, slices); }).empty()) continue;
        SimulationOptions options = simulation_options(costing);
        options.cap_per_rank = caps_for(request.memory, schedule.rank_of_stage, ranks, costs);
        const Simulation simulation = simulate(schedule, costs, options);
        if (request.memory > 0 && peak_of(simulation) > request.memory) continue;
        all.push_back(m * size / simulation.step_seconds);
      }
    }
  };
  std::vector<size_t> counts = {1};  // of slices
  for (const auto& lengths : model.slice_lengths) counts.push_back(lengths.size());
  for (const auto& mode : request.recompute.empty() ? recompute_names() : request.recompute) {
    const CostModel costing = with_recompute(model, mode);
    for (const auto& name : planned_schedules()) {
      for (const int ranks : request.ranks) {
        for (const int size : request.micro_batch_sizes) {
          for (const size_t slices : counts) add(name, ranks, costing, size, static_cast<int>(slices));
        }
      }
    }
  }
  std::sort(all.rbegin(), all.rend());
  return all;
}

// The first row may be slower, because the planner trades a little speed for less memory.
double most_samples_per_second(const PlanResult& result) {
  double most = 0;
  for (const PlanChoice& choice : result.best) most = std::max(most, choice.samples_per_second());
  return most;
}

std::vector<double> samples_per_second(const PlanResult& result) {
  std::vector<double> all;
  for (const PlanChoice& choice : result.best) all.push_back(choice.samples_per_second());
  return all;
}

// Of whole sequences, of samples that cost unequally, and of slices.
TEST(Planner, RanksAsSimulatingEverythingDoes) {
  Random random(11);
  for (int round = 0; round < 9; ++round) {
    CostModel model = random_model(random, 8);
    PlanRequest request = small_request();
    if (round % 3 == 1) make_unequal(random, model);
    if (round % 3 == 2) {
      cut_into_slices(random, model, {2, 4});
      request.recompute = {"none"};
    }
    const PlanResult result = plan(model, request);
    auto all = by_brute_force(model, request);
    EXPECT_EQ(result.combinations, static_cast<int64_t>(all.size()));
    request.top = 0;
    const PlanResult without_limit = plan(model, request);
    EXPECT_EQ(without_limit.simulated, without_limit.combinations);
    auto listed = samples_per_second(without_limit);
    EXPECT_TRUE(std::is_sorted(listed.rbegin(), listed.rend() - 1));
    std::sort(listed.rbegin(), listed.rend());
    ASSERT_EQ(listed.size(), all.size());
    for (size_t i = 0; i < all.size(); ++i) EXPECT_DOUBLE_EQ(listed[i], all[i]) << i;
    ASSERT_EQ(result.best.size(), 7U);
    const double first = result.best[0].samples_per_second();
    EXPECT_GE(first, 0.99 * all[0]);
    const auto at = std::ranges::find_if(all, [&](double one) { return std::abs(one / first - 1) < 1e-12; });
    ASSERT_NE(at, all.end());
    all.erase(at);
    for (size_t i = 1; i < 7; ++i) EXPECT_DOUBLE_EQ(result.best[i].samples_per_second(), all[i - 1]) << i;
    EXPECT_LT(result.simulated, result.combinations) << "the bound leaves some out";
    const Simulation again = simulate_choice(model, result.best[0]);
    EXPECT_EQ(again.step_seconds, result.best[0].step_seconds);
    EXPECT_EQ(peak_of(again), result.best[0].peak_bytes);
    PlanChoice off = result.best[0];
    off.policy = P2Policy::kOff;
    const Simulation without = simulate_choice(model, off);
    EXPECT_DOUBLE_EQ(result.speed_up, without.step_seconds / result.best[0].step_seconds);
    EXPECT_DOUBLE_EQ(result.memory_factor, result.best[0].peak_bytes / peak_of(without));
  }
}

// A reference model of 8 layers before 8 that are trained: in stages beside theirs, with the next batch known, no rank
// waits.
TEST(Planner, GivesFrozenLayersStagesOfTheirOwn) {
  TestKind frozen;
  frozen.backward_p1 = frozen.backward_p2 = frozen.stash = frozen.held = 0;
  std::vector<TestKind> layers(8, frozen);
  layers.resize(16);
  CostModel model = model_of(layers);
  model.first_trainable = 8;
  PlanRequest request;
  request.ranks = {2};
  request.micro_batches = {2};
  request.micro_batch_sizes = {1};
  request.recompute = {"none"};
  request.schedules = {"1f1b"};
  const PlanChoice best = plan(model, request).best[0];
  EXPECT_EQ(best.policy, P2Policy::kFill);
  EXPECT_EQ(best.frozen_stages, 2);
  EXPECT_EQ(best.stages, 4);
  EXPECT_EQ(best.split, (std::vector<int>{4, 4, 4, 4}));
  EXPECT_EQ(best.step_seconds, 2 * 4 * 4) << "as long as a rank computes";
  EXPECT_EQ(simulate_choice(model, best).step_seconds, best.step_seconds);
  request.search = true;
  EXPECT_LE(plan(model, request).best[0].step_seconds, best.step_seconds);
  model.first_trainable = 1;
  EXPECT_EQ(plan(model, request).best[0].frozen_stages, 0);
}

// With as many micro-batches as ranks, the costliest one sets the pace.
TEST(Planner, KnowsThatMicroBatchesCostUnequally) {
  CostModel model = model_of({{}, {}, {}, {}});
  PlanRequest request;
  request.ranks = {2};
  request.micro_batches = {2};
  request.micro_batch_sizes = {1};
  request.schedules = {AskedSchedule("1f1b@off")};
  request.recompute = {"none"};
  EXPECT_DOUBLE_EQ(plan(model, request).best.at(0).step_seconds, (2 + 1) * 6);
  model.sample_costs = {0.5, 1.5};
  EXPECT_DOUBLE_EQ(plan(model, request).best.at(0).step_seconds, (2 + 1) * 6) << "no layer rises";
  for (auto& [name, kind] : model.kinds) kind.at_size[0].forward_rise = 1;
  // F takes 1 and 3 s on each rank, I and W 4 s: rank 1 begins after 1 s, and ends F of the costly one last.
  const PlanChoice choice = plan(model, request).best.at(0);
  const Simulation simulation = simulate_choice(model, choice, request);
  EXPECT_EQ(choice.step_seconds, simulation.step_seconds);
  EXPECT_DOUBLE_EQ(choice.step_seconds, 1 + 1 + 4 + 3 + 4 + 4) << "F0 F0 B0 F1 B1 on rank 1, then B1 on rank 0";
  request.search = true;
  EXPECT_LE(plan(model, request).best.at(0).step_seconds, choice.step_seconds);
}

// The first row is the same for any number of rows. It is not always the fastest one.
TEST(Planner, PutsLittleMemoryFirstAmongTheFastest) {
  Random random(19);
  int slower = 0;
  for (int round = 0; round < 6; ++round) {
    const CostModel model = random_model(random, 8);
    PlanRequest request = small_request();
    const PlanChoice first = plan(model, request).best[0];
    for (const int top : {0, 1, 60}) {
      request.top = top;
      const PlanResult result = plan(model, request);
      EXPECT_EQ(result.best[0].step_seconds, first.step_seconds);
      EXPECT_EQ(result.best[0].peak_bytes, first.peak_bytes);
      if (top == 0) slower += first.samples_per_second() < most_samples_per_second(result) ? 1 : 0;
    }
  }
  EXPECT_GT(slower, 0);
}

TEST(Planner, KeepsWithinTheMemory) {
  Random random(13);
  for (int round = 0; round < 6; ++round) {
    const CostModel model = random_model(random, 8);
    PlanRequest request = small_request();
    const PlanResult free = plan(model, request);
    request.memory = 0.8 * free.best[0].peak_bytes;
    const PlanResult result = plan(model, request);
    ASSERT_FALSE(result.best.empty());
    for (const auto& choice : result.best) {
      EXPECT_LE(choice.peak_bytes, request.memory * (1 + 1e-9));
      EXPECT_LE(peak_of(simulate_choice(model, choice, request)), request.memory * (1 + 1e-9));
    }
    EXPECT_LE(most_samples_per_second(result), most_samples_per_second(free) * (1 + 1e-9));
    // A split within the memory may exist where the fastest split does not fit, so the result may be better
    // than all of these.
    const auto all = by_brute_force(model, request);
    const double most = all.empty() ? 0 : all[0];
    EXPECT_GE(most_samples_per_second(result), most * (1 - 1e-9));
  }
}

// The smallest sufficient memory is enough, and a smaller one is not. This model consists almost only of
// messages. A tensor that is sent on is held once, so the model fits into exactly its peak.
TEST(Planner, PlansWithinExactlyItsPeak) {
  CostModel model = model_of(
      {{.held = 0.1, .stash = 0, .output = 10, .fixed = 30}, {.held = 0.1, .stash = 0, .output = 0.1, .fixed = 30}});
  PlanRequest request;
  request.ranks = {2};
  request.schedules = {"1f1b"};
  request.micro_batches = {1};
  request.micro_batch_sizes = {1};
  request.recompute = {"none"};
  const double peak = plan(model, request).best.front().peak_bytes;
  request.memory = peak;
  const PlanResult result = plan(model, request);
  ASSERT_FALSE(result.best.empty());
  EXPECT_EQ(result.best.front().peak_bytes, peak);
  request.memory = 0.9 * peak;
  EXPECT_TRUE(plan(model, request).best.empty());
}

// On slow links, waiting messages count on their sender. More room for W to wait means longer waits.
// The first bound of the memory is exact here: a layer without messages, and one micro-batch. It must not
// refuse what just fits.
TEST(Planner, TakesWhatItsFirstBoundJustAllows) {
  PlanRequest request;
  request.ranks = {1};
  request.micro_batches = {1};
  request.micro_batch_sizes = {1};
  request.memory = 30 + 10;
  const PlanResult result = plan(model_of({{.held = 10, .stash = 8, .output = 0, .fixed = 30}}), request);
  ASSERT_FALSE(result.best.empty());
  EXPECT_EQ(result.best[0].peak_bytes, 40);
  request.memory = 39.9;
  EXPECT_TRUE(plan(model_of({{.held = 10, .stash = 8, .output = 0, .fixed = 30}}), request).best.empty());
}

TEST(Planner, FitsTheSmallestMemoryOnSlowLinks) {
  Random random(8);
  for (int round = 0; round < 30; ++round) {
    std::vector<TestKind> kinds(4);
    for (TestKind& kind : kinds) {
      kind.output = random_int(random, 1, 40);
      kind.stash = random_int(random, 0, 20);
      kind.backward_p1 = random_int(random, 1, 9);
      kind.backward_p2 = random_int(random, 1, 9);
    }
    CostModel model = model_of(kinds);
    const double slow = random_int(random, 1, 10);
    PlanRequest request;
    if (round % 2 == 0) {
      model.link_bytes_per_second = slow;
    } else {
      request.interconnect.link = LinkSpeed{0, slow};
      request.schedules = {"gpipe"};  // several messages wait at once
      request.micro_batches = {6};
    }
    request.ranks = {2, 4};
    request.micro_batch_sizes = {1};
    request.recompute = {"none"};
    request.memory = 1;
    const PlanResult none = plan(model, request);
    ASSERT_TRUE(none.smallest.has_value());
    request.memory = none.smallest->peak_bytes;
    EXPECT_FALSE(plan(model, request).best.empty()) << "round " << round;
  }
}

// The best combination of all replicas comes first, whatever the bound leaves out.
TEST(Planner, BoundsHoldForReplicas) {
  Random random(12);
  for (int round = 0; round < 5; ++round) {
    const CostModel model = random_model(random, 6);
    PlanRequest request = small_request();
    request.data_parallel = {1, 3};
    request.recompute = {"none"};
    request.top = 0;
    const PlanResult all = plan(model, request);
    request.top = 1;
    EXPECT_EQ(plan(model, request).best.front().samples_per_second(), all.best.front().samples_per_second());
    EXPECT_EQ(all.best.front().data_parallel, 3);
  }
}

// Loops have several stages on each rank.
TEST(Planner, MakesNoLoopOfOneStageOnARank) {
  const CostModel model = model_of(std::vector<TestKind>(8));
  PlanRequest request;
  request.ranks = {2};
  request.stages = {2, 4, 6};
  request.recompute = {"none"};
  const auto all = candidates({{"none", model}}, request);
  std::set<std::pair<std::string, int>> shapes;
  for (const Candidate& candidate : all) shapes.insert({candidate.choice.schedule.name(), candidate.choice.stages});
  EXPECT_FALSE(shapes.contains({"looped-bfs", 2}));
  EXPECT_TRUE(shapes.contains({"looped-bfs", 4}));
  EXPECT_TRUE(shapes.contains({"looped-bfs", 6}));
  EXPECT_TRUE(shapes.contains({"1f1b", 2}));
  EXPECT_FALSE(shapes.contains({"1f1b", 4}));
  EXPECT_TRUE(shapes.contains({"zb-v", 4}));
  EXPECT_FALSE(shapes.contains({"zb-v", 6}));
}

TEST(Planner, CountsTheReasonsThatItLeavesOut) {
  PlanRequest request;
  request.ranks = {11, 12, 13, 14, 15};
  request.schedules = {"1f1b"};
  const CostModel model = model_of(std::vector<TestKind>(4));
  expect_contains(error_of([&] { plan(model, request); }), {"11 stages", "13 stages", "and 2 reasons more"});
}

TEST(Planner, SaysTheSmallestSufficientMemory) {
  Random random(14);
  for (int round = 0; round < 8; ++round) {
    CostModel model = random_model(random, 6);
    PlanRequest request = small_request();
    request.ranks = {2};
    if (round % 2 == 1) {
      cut_into_slices(random, model, {2, 4});
      request.slices = {2, 4};
      request.recompute = {"none"};
    }
    request.memory = 10;
    const PlanResult nothing = plan(model, request);
    EXPECT_TRUE(nothing.best.empty());
    ASSERT_TRUE(nothing.smallest.has_value());
    EXPECT_GT(nothing.smallest->peak_bytes, 10);
    EXPECT_EQ(nothing.smallest->slices > 1, round % 2 == 1);
    for (const double times : {1.0, 1.1, 1.5}) {
      request.memory = times * nothing.smallest->peak_bytes;
      const PlanResult just = plan(model, request);
      ASSERT_FALSE(just.best.empty()) << times;
      for (const PlanChoice& choice : just.best) {
        EXPECT_LE(choice.peak_bytes, request.memory * (1 + 1e-9));
        EXPECT_LE(peak_of(simulate_choice(model, choice, request)), request.memory * (1 + 1e-9));
      }
    }
    request.memory = nothing.smallest->peak_bytes * 0.98;
    EXPECT_TRUE(plan(model, request).best.empty()) << "a smaller configuration would have fitted";
  }
}

// So that no bound leaves out what fits.
TEST(Planner, FitsTheSmallestMemoryWithSharedWeights) {
  Random random(23);
  for (int round = 0; round < 12; ++round) {
    CostModel model = random_model(random, 6);
    for (const char* kind : {"kind0", "kind5"}) {
      model.kinds[kind].parameter_bytes = model.kinds[kind].optimizer_bytes = 300;
      model.kinds[kind].tied["table"] = {500, 10};
    }
    if (round % 3 == 0) model.kinds["kind2"].sharded_bytes = model.kinds["kind3"].sharded_bytes = 10;
    PlanRequest request;
    request.ranks = {1, 2, 3};
    request.data_parallel = {1, 2};
    request.one_memory = round % 2 == 1;
    request.top = 0;
    double least = std::numeric_limits<double>::infinity();
    for (const PlanChoice& choice : plan(model, request).best) least = std::min(least, choice.peak_bytes);
    request.memory = least;
    const PlanResult within = plan(model, request);
    ASSERT_FALSE(within.best.empty()) << "round " << round;
    for (const PlanChoice& choice : within.best) EXPECT_LE(choice.peak_bytes, least);
  }
}

// Among many combinations, the planner simulates none that cannot beat the least memory found so far.
TEST(Planner, FindsTheSmallestMemoryWithoutSimulatingAll) {
  Random random(17);
  const CostModel model = random_model(random, 24);
  PlanRequest request;
  request.ranks = {2, 3, 4, 5, 6, 7, 8};
  request.memory = 10;
  const PlanResult nothing = plan(model, request);
  ASSERT_TRUE(nothing.smallest.has_value());
  EXPECT_GT(nothing.combinations, 5000);
  EXPECT_LT(nothing.simulated, nothing.combinations / 20);
  request.memory = 0.97 * nothing.smallest->peak_bytes;
  const PlanResult close = plan(model, request);
  EXPECT_LT(close.simulated, close.combinations / 10);
  ASSERT_TRUE(close.smallest.has_value());
  EXPECT_EQ(close.smallest->peak_bytes, nothing.smallest->peak_bytes);
  request.memory = nothing.smallest->peak_bytes;
  EXPECT_FALSE(plan(model, request).best.empty());
}

// Boundaries have different sizes, so a stage may send another amount than it holds.
void make_boundaries_unequal(Random& random, CostModel& model) {
  for (auto& [name, kind] : model.kinds) {
    const double output = random_int(random, 1, 40);
    for (LayerCost& layer : kind.at_size) {
      layer.forward_held += output - layer.output;
      layer.forward_peak = std::max(0.0, layer.forward_held);
      layer.output = layer.input_gradient = output;
      layer.p1_peak = output;
    }
  }
}

// Schedules from the search are rows of their own. They are never slower than the named ones, and stay within
// the memory. If the search finds nothing, the rows of named schedules remain.
TEST(Planner, SearchesForSchedules) {
  Random random(15);
  std::vector<int> found(3, 0);
  for (int round = 0; round < 15; ++round) {
    CostModel model = random_model(random, 6);
    if (round % 3 == 1) make_boundaries_unequal(random, model);
    if (round % 3 == 2) cut_into_slices(random, model, {4});
    PlanRequest request = request_to_search(model);
    if (round % 3 == 2) request.slices = {4};
    const PlanResult named = plan(model, request);
    request.search = true;
    const PlanResult searched = plan(model, request);
    EXPECT_EQ(searched.best.size(), 7U);
    EXPECT_GE(most_samples_per_second(searched), most_samples_per_second(named));
    for (const PlanChoice& choice : searched.best) {
      EXPECT_EQ(choice.found.has_value(), choice.schedule.name() == "auto");
      EXPECT_LE(choice.peak_bytes, request.memory * (1 + 1e-9));
      EXPECT_EQ(choice.slices, round % 3 == 2 ? 4 : 1);
      if (!choice.found) continue;
      ++found[round % 3];
      EXPECT_EQ(choice.found->slices, choice.slices);
      const Simulation again = simulate_choice(model, choice, request);
      EXPECT_EQ(again.step_seconds, choice.step_seconds);
    }
  }
  EXPECT_GT(std::ranges::min(found), 0);
}

// Six layers take the same time, and three of them have fixed bytes. Three layers on each rank would need 210
// bytes on the first. Its W of the last layer takes 50 more for a while, on whatever rank. Of the splits that
// leave room for it, that with two layers on rank 0 is the fastest, and that with one needs the least.
TEST(Planner, LeavesRoomForAPeakInItsSplit) {
  const auto layer = [](double fixed) { return TestKind{.held = 0, .stash = 0, .output = 0, .fixed = fixed}; };
  CostModel model = model_of({layer(90), layer(60), layer(60), layer(0), layer(0), layer(0)});
  for (LayerCost& cost : model.kinds["kind5"].at_size) cost.p2_peak = 50;
  PlanRequest request;
  request.ranks = {2};
  request.micro_batches = {4};
  request.micro_batch_sizes = {1};
  request.schedules = {"gpipe"};
  request.policies = {P2Policy::kOff};
  request.recompute = {"none"};
  for (const auto& [memory, split] : {std::pair{210.0, std::vector{3, 3}}, {205, {2, 4}}, {195, {1, 5}}}) {
    request.memory = memory;
    const PlanResult result = plan(model, request);
    ASSERT_EQ(result.best.size(), 1U);
    EXPECT_EQ(result.best[0].split, split) << memory;
  }
}

// One rank never waits, so the search finds nothing that is faster, and adds no row.
TEST(Planner, AddsOnlyFasterSchedules) {
  PlanRequest request;
  request.ranks = {1};
  request.micro_batches = {4};
  request.top = 0;
  request.search = true;
  const PlanResult result = plan(model_of(std::vector<TestKind>(3)), request);
  ASSERT_FALSE(result.best.empty());
  for (const PlanChoice& choice : result.best) EXPECT_FALSE(choice.found.has_value());
}

// On the shared links of this machine, 1f1b is faster than what the search finds. Who asks for gpipe alone
// does not get it.
TEST(Planner, AddsNoNamedScheduleThatIsNotAskedFor) {
  const CostModel model = model_of({{2, 3, 0, 1, 0, 1}, {2, 1, 2, 3, 1, 3}, {1, 2, 3, 2, 1, 1}, {2, 3, 1, 1, 1, 2}});
  PlanRequest request;
  request.ranks = {4};
  request.micro_batches = {2};
  request.micro_batch_sizes = {1};
  request.recompute = {"none"};
  request.interconnect = {.link = LinkSpeed{0, 3}, .ranks_per_node = 2, .node = LinkSpeed{0, 1}, .data = {}};
  request.schedules = {"1f1b"};
  const double named = most_samples_per_second(plan(model, request));
  request.schedules = {"gpipe"};
  request.search = true;
  const PlanResult searched = plan(model, request);
  EXPECT_LT(most_samples_per_second(searched), named);
  for (const PlanChoice& choice : searched.best) EXPECT_EQ(schedule_of(choice).name, choice.schedule.name());
}

// If the memory forces W to run early, another split than the balanced one may be faster. The split that is
// found is never slower, and stays within the memory.
TEST(Planner, SearchesForSplits) {
  Random random(18);
  int faster = 0;
  for (int round = 0; round < 6; ++round) {
    const CostModel model = random_model(random, 9);
    PlanRequest request = small_request();
    request.ranks = {2};
    request.micro_batches = {6};
    request.recompute = {"none"};
    request.schedules = {"zb-v"};
    for (const PlanChoice& choice : plan(model, request).best)
      request.memory = std::max(request.memory, 0.9 * choice.peak_bytes);
    const PlanResult by_seconds = plan(model, request);
    request.search = true;
    const PlanResult searched = plan(model, request);
    ASSERT_FALSE(searched.best.empty());
    for (const PlanChoice& choice : searched.best) EXPECT_LE(choice.peak_bytes, request.memory * (1 + 1e-9));
    PlanResult named = searched;
    std::erase_if(named.best, [](const PlanChoice& choice) { return choice.found.has_value(); });
    ASSERT_FALSE(named.best.empty());
    for (const PlanChoice& choice : named.best)
      EXPECT_EQ(simulate_choice(model, choice, request).step_seconds, choice.step_seconds);
    if (by_seconds.best.empty()) continue;
    EXPECT_GE(most_samples_per_second(named), most_samples_per_second(by_seconds));
    faster += most_samples_per_second(named) > 1.005 * most_samples_per_second(by_seconds) ? 1 : 0;
  }
  EXPECT_GT(faster, 0);
}

TEST(Planner, CountsMoreSamplesThanAnInt) {
  PlanChoice choice;
  choice.micro_batches = choice.micro_batch_size = 1 << 20;
  choice.step_seconds = 1024;
  EXPECT_EQ(choice.samples_per_second(), static_cast<double>(int64_t{1} << 30));
}

// Costs that were measured with recomputation are planned unchanged.
TEST(Planner, LeavesRecomputedCostsAlone) {
  const CostModel model = with_recompute(model_of(std::vector<TestKind>(6)), "both");
  PlanRequest request = small_request();
  const PlanResult result = plan(model, request);
  ASSERT_FALSE(result.best.empty());
  for (const PlanChoice& choice : result.best) EXPECT_EQ(choice.recompute, "none");
  request.recompute = {"activations"};
  expect_contains(error_of([&] { plan(model, request); }), {"already"});
}

TEST(Planner, PlansOnlyTheRequestedSchedules) {
  const CostModel model = model_of(std::vector<TestKind>(8));
  PlanRequest request;
  request.stages = {4};
  request.schedules = {"1f1b", "zb-v", "interleaved-1f1b"};
  request.policies = {P2Policy::kFill};
  request.recompute = {"none"};
  request.batch = 8;
  request.micro_batch_sizes = {1, 2, 3};
  request.micro_batches = {4, 8};
  request.top = 0;
  const PlanResult result = plan(model, request);
  ASSERT_FALSE(result.best.empty());
  for (const auto& choice : result.best) {
    EXPECT_EQ(choice.stages, 4);
    EXPECT_EQ(choice.ranks, choice.schedule.name() == "1f1b" ? 4 : 2);
    EXPECT_EQ(choice.micro_batches * choice.micro_batch_size, 8);
    EXPECT_EQ(choice.policy, P2Policy::kFill);
    EXPECT_EQ(choice.recompute, "none");
  }
}

// A larger pipeline is faster: four equal layers spread over more ranks. The default M is N, 2N and 4N.
TEST(Planner, MoreRanksAreFaster) {
  const CostModel model = model_of(std::vector<TestKind>(8));
  PlanRequest request;
  request.ranks = {1, 2, 4};
  const PlanResult result = plan(model, request);
  EXPECT_EQ(result.best[0].ranks, 4);
  EXPECT_EQ(result.best[0].micro_batches, 16);
  EXPECT_GT(result.speed_up, 1.01);
  EXPECT_EQ(gain_text(result).rfind(concat("2BP: ", fixed(result.speed_up, 2), "x as fast"), 0), 0U);
}

// Each layer has 100 bytes of weights, gradients and optimizer state each. Two micro-batches keep 8 bytes for W.
TEST(Planner, PlansStreamedGradients) {
  CostModel model = model_of(std::vector<TestKind>(4, {.held = 1, .stash = 1, .output = 0, .fixed = 300}));
  for (auto& [name, kind] : model.kinds) {
    for (LayerCost& cost : kind.at_size) cost.streamed_gradient = 50;
  }
  PlanRequest request;
  request.ranks = {1};
  request.schedules = {"1f1b"};
  request.micro_batches = {2};
  request.micro_batch_sizes = {1};
  request.recompute = {"none"};
  request.policies = {P2Policy::kOff, P2Policy::kFill};
  request.streams = {false, true};
  std::map<std::pair<P2Policy, bool>, double> bytes;
  for (const PlanChoice& choice : plan(model, request).best) bytes[{choice.policy, choice.streams}] = choice.peak_bytes;
  EXPECT_EQ(bytes.size(), 3U) << "with p2 off, gradients are kept";
  EXPECT_EQ((bytes[{P2Policy::kFill, false}]), 1208);
  EXPECT_EQ((bytes[{P2Policy::kFill, true}]), 858);
  request.memory = 900;
  const PlanResult within = plan(model, request);
  ASSERT_EQ(within.best.size(), 1U);
  EXPECT_TRUE(within.best.front().streams);
  request.memory = 850;
  const PlanResult nothing = plan(model, request);
  EXPECT_TRUE(nothing.best.empty());
  ASSERT_TRUE(nothing.smallest);
  EXPECT_EQ(nothing.smallest->peak_bytes, 858);

  PlanRequest off = request;
  off.streams = {true};
  off.policies = {P2Policy::kOff};
  expect_contains(error_of([&] { plan(model, off); }), {"p2 off", "gradients are not streamed"});

  // The gradient of a tied weight is not streamed.
  LayerCost& tied = model.kinds.at(model.layers.front().kind).at_size.front();
  const auto alike = std::ranges::count(model.layers, model.layers.front().kind, &ModelLayer::kind);
  tied.tied_gradient = 40;
  const PlanResult kept = plan(model, request);
  ASSERT_TRUE(kept.smallest);
  EXPECT_EQ(kept.smallest->peak_bytes, 858 + 40 * static_cast<double>(alike));

  // Gradients that are made in I are held until their layer's W has run, which comes first here: 20 beside its 30, and
  // none beside the 50 of the others.
  tied.tied_gradient = 0;
  tied.p1_gradient = 20;
  const PlanResult in_p1 = plan(model, request);
  ASSERT_TRUE(in_p1.smallest);
  EXPECT_EQ(in_p1.smallest->peak_bytes, 858);
}

TEST(Planner, RejectsImpossibleProblems) {
  const CostModel model = model_of(std::vector<TestKind>(3));
  PlanRequest request;
  expect_contains(error_of([&] { plan(model, request); }), {"a number of ranks or a number of stages"});
  request.ranks = {4};
  expect_contains(error_of([&] { plan(model, request); }), {"no combination", "3 layers"});
  request.ranks = {0};
  expect_contains(error_of([&] { plan(model, request); }), {"ranks", "at least 1"});
  request.ranks = {2};
  request.micro_batch_sizes = {0};
  expect_contains(error_of([&] { plan(model, request); }), {"micro-batch size", "at least 1"});
  request.micro_batch_sizes = {3};
  request.schedules = {"1f1b"};
  request.batch = 7;
  expect_contains(error_of([&] { plan(model, request); }), {"no combination", "7 samples"});
  request.batch = 0;
  request.schedules = {"1f1"};
  expect_contains(error_of([&] { plan(model, request); }), {"'1f1b'"});
  request.schedules = {"gpipe"};
  request.policies = {P2Policy::kPlaced};
  expect_contains(error_of([&] { plan(model, request); }), {"gpipe", "placed"});
  request.policies.clear();
  request.recompute = {"some"};
  expect_contains(error_of([&] { plan(model, request); }), {"some", "activations"});
  request.recompute.clear();
  request.memory = -1;
  expect_contains(error_of([&] { plan(model, request); }), {"memory", "negative"});
  request.memory = 0;
  CostModel bad = model;
  bad.kinds["kind1"].at_size[0].backward_p1 = -1;
  expect_contains(error_of([&] { plan(bad, request); }), {"kind1", "backward-p1"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
