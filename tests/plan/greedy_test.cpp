// Tests list scheduling with small orders by hand: what each part of a rule does.
#include <algorithm>
#include <set>
#include <tuple>

#include "tests/plan/pipelines.h"
#include "twobp/plan/auto_schedule/problem.h"

namespace twobp::TWOBP_FILE {
namespace {

using Prefer = GreedyRule::Prefer;

// F, I and W take 1, and hold 1 until W.
Pipeline equal_stages(std::vector<int> rank_of_stage, int micro_batches) {
  Pipeline pipeline;
  pipeline.costs.resize(rank_of_stage.size());
  pipeline.rank_of_stage = std::move(rank_of_stage);
  pipeline.micro_batches = micro_batches;
  return pipeline;
}

// The ops of each rank, a line each.
std::string order_of(const Pipeline& pipeline, const GreedyRule& rule) {
  const PipelineProblem problem(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, pipeline.options,
                                pipeline.slices);
  const TaskOrder order = greedy_order(problem, rule);
  EXPECT_TRUE(problem.fits(order));
  std::string text;
  for (std::vector<Instruction> list : problem.to_schedule(order, P2Policy::kPlaced).ranks) {
    std::erase_if(list, [](const Instruction& i) { return !is_compute(i.op); });
    text += text_of(list) + '\n';
  }
  return text;
}

// A way there and back takes 4 on rank 0, a round 3: two micro-batches may be under way. On rank 1 it is one.
TEST(Greedy, BackwardFirstIsOneForwardOneBackward) {
  EXPECT_EQ(order_of(equal_stages({0, 1}, 3), {}),
            "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2\n"
            "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2\n");
}

TEST(Greedy, ForwardFirstWithoutALimitIsGPipe) {
  EXPECT_EQ(order_of(equal_stages({0, 1}, 3), {.prefer = Prefer::kForward, .in_flight = 0}),
            "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2\n"
            "1F0 1F1 1F2 1I0 1I1 1I2 1W0 1W1 1W2\n");
}

// Messages of 1 make the way 6, so the limit stays 2. I comes back at 5, 8 and 11.
TEST(Greedy, CountsMessages) {
  Pipeline pipeline = equal_stages({0, 1}, 3);
  pipeline.options.message_seconds = 1;
  EXPECT_EQ(order_of(pipeline, {}),
            "0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2\n"
            "1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2\n");
  EXPECT_EQ(order_of(pipeline, {.in_flight = 1.1}),
            "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2\n"
            "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2\n")
      << "1.1 times 6 is more than two rounds: three";
}

// W takes 2, and I of rank 1 too. Before its second I, rank 0 waits for 1.
TEST(Greedy, StartsWIfEnoughOfItFits) {
  Pipeline pipeline = equal_stages({0, 1}, 3);
  pipeline.costs[1].backward_p1 = 2;
  for (StageCost& cost : pipeline.costs) cost.backward_p2 = 2;
  const auto rank_0 = [&](double w_fits) {
    const std::string text = order_of(pipeline, {.in_flight = 2, .w_fits = w_fits});
    return text.substr(0, text.find('\n'));
  };
  for (const double fits : {0.0, 0.5}) EXPECT_EQ(rank_0(fits), "0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2");
  for (const double more : {0.51, 1.0}) EXPECT_EQ(rank_0(more), "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2");
}

// From F to W, a limit of two micro-batches on rank 0 and of one on rank 1; or room for two on rank 0: there
// F2 waits for W0.
TEST(Greedy, MakesRoom) {
  Pipeline pipeline = equal_stages({0, 1}, 3);
  EXPECT_EQ(order_of(pipeline, {.unfinished = 1}),
            "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n"
            "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2\n");
  pipeline.options.cap_per_rank = {2, 0};
  EXPECT_EQ(order_of(pipeline, {}),
            "0F0 0F1 0I0 0W0 0I1 0F2 0W1 0I2 0W2\n"
            "1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2\n");
}

TEST(Greedy, FusesWhereTheStashHasNoRoom) {
  Pipeline pipeline = equal_stages({0}, 2);
  pipeline.costs[0].stash_bytes = 2;
  const auto with = [&](double cap, double fuse) {
    pipeline.options.cap_per_rank = {cap};
    return order_of(pipeline, {.in_flight = 0, .fuse = fuse});
  };
  EXPECT_EQ(with(3, 0), "0F0 0I0 0F1 0W0 0I1 0W1\n") << "I1 waits for W0";
  EXPECT_EQ(with(2, 0), "0F0 0I0 0W0 0F1 0I1 0W1\n") << "F1 waits for W0";
  EXPECT_EQ(with(1.5, 0), "0F0 0B0 0F1 0B1\n") << "a stash never fits";
  EXPECT_EQ(with(3, 1), "0F0 0B0 0F1 0B1\n") << "on request";
  pipeline.costs[0].stash_bytes = 1;
  EXPECT_EQ(with(3, 1), "0F0 0I0 0F1 0I1 0W0 0W1\n") << "B would save no bytes";
}

TEST(Greedy, ChoosesAmongTheStagesOfARank) {
  const Pipeline pipeline = equal_stages({0, 0}, 2);
  const auto order = [&](bool deepest) {
    return order_of(pipeline, {.prefer = Prefer::kForward, .deepest_forward = deepest, .in_flight = 0});
  };
  EXPECT_EQ(order(true).substr(0, 15), "0F0 1F0 0F1 1F1");
  EXPECT_EQ(order(false).substr(0, 15), "0F0 0F1 1F0 1F1");
  // W of the oldest micro-batch comes first, and of these that of the later stage.
  for (const bool deepest : {true, false}) EXPECT_EQ(order(deepest).substr(32), "1W0 0W0 1W1 0W1\n");
}

// Slices: one more may be under way for each slice of a micro-batch after the first. I and W go last to
// first.
TEST(Greedy, RunsSlices) {
  Pipeline pipeline = equal_stages({0, 1}, 2);
  pipeline.slices = 2;
  EXPECT_EQ(order_of(pipeline, {}),
            "0F0 0F1 0F2 0I1 0I0 0F3 0W1 0W0 0I3 0I2 0W3 0W2\n"
            "1F0 1F1 1I1 1I0 1F2 1W1 1F3 1I3 1I2 1W0 1W3 1W2\n");
}

// Of two ready ops, the one with the longer way to the end. Rank 0 has the first and the last stage. After
// 0F2 come F and I of the three stages, and W: 1 + 1 + 1 + 9 + 1 + 1 with a long I of the middle stage. But
// after 2F0 come I of the last stage, all three long I, the last I and W, which is 30.
TEST(Greedy, TakesTheLongestTail) {
  Pipeline pipeline = equal_stages({0, 1, 0}, 3);
  pipeline.costs[1].backward_p1 = 9;
  const std::string order = order_of(pipeline, {.prefer = Prefer::kLongestTail, .in_flight = 0});
  EXPECT_EQ(order.substr(0, 27), "0F0 0F1 2F0 2I0 2F1 2I1 0F2");
}

// The same with six micro-batches and a long F of the middle stage. At 4, there are 0F4 and 2F0. After 0F4
// come two long F, F and three I, and W: 3 + 3 + 5. After 2F0 come the five other F of its stage, three I,
// and W, which is 9. After 0F5 comes a long F, so 2F0 is next.
TEST(Greedy, CountsTheWayForward) {
  Pipeline pipeline = equal_stages({0, 1, 0}, 6);
  pipeline.costs[1].forward = 3;
  const std::string order = order_of(pipeline, {.prefer = Prefer::kLongestTail, .in_flight = 0});
  EXPECT_EQ(order.substr(0, 23), "0F0 0F1 0F2 0F3 0F4 2F0");
}

// At 3, rank 0 has F of the last of four micro-batches and the first I. After this F come F, two I and a W
// of 5. After this I come four W.
TEST(Greedy, CountsTheWOfTheFirstStage) {
  Pipeline pipeline = equal_stages({0, 1}, 4);
  pipeline.costs[0].backward_p2 = 5;
  const std::string order = order_of(pipeline, {.prefer = Prefer::kLongestTail, .in_flight = 0});
  EXPECT_EQ(order.substr(0, 19), "0F0 0F1 0F2 0I0 0F3");
}

// Seconds, milliseconds or any unit: the order is the same.
TEST(Greedy, HasNoUnitOfTime) {
  Random random(4);
  for (int round = 0; round < 20; ++round) {
    Pipeline pipeline = random_pipeline(random, round % 2 == 0 ? Placement::kV : Placement::kLooped, 3, 6);
    Pipeline shorter = pipeline;
    shorter.options.message_seconds /= 1024;
    for (StageCost& cost : shorter.costs) {
      for (double StageCost::*of :
           {&StageCost::forward, &StageCost::backward_p1, &StageCost::backward_p2, &StageCost::optimizer})
        cost.*of /= 1024;
    }
    for (const GreedyRule& rule : greedy_rules(94, 1)) EXPECT_EQ(order_of(pipeline, rule), order_of(shorter, rule));
  }
}

TEST(GreedyRules, AreFixedFirstAndThenDrawn) {
  const auto key = [](const GreedyRule& r) {
    return std::tuple(r.prefer, r.deepest_forward, r.in_flight, r.unfinished, r.w_fits, r.noise, r.fuse, r.seed);
  };
  EXPECT_EQ(greedy_rules(0, 1).size(), 1U);
  const auto rules = greedy_rules(400, 1);
  const auto others = greedy_rules(400, 2);
  ASSERT_EQ(rules.size(), 400U);
  EXPECT_EQ(rules[0].prefer, Prefer::kBackward);
  EXPECT_EQ(rules[0].in_flight, 1);
  std::set<decltype(key(rules[0]))> known;
  // 5 limits, 3 preferences, 3 parts of W, 2 orders of F, and one more for each limit but 0
  const size_t fixed = 94;
  for (size_t i = 0; i < rules.size(); ++i) {
    const GreedyRule& rule = rules[i];
    EXPECT_TRUE(known.insert(key(rule)).second) << i;
    EXPECT_EQ(key(rule) == key(others[i]), i < fixed) << i;
    if (i < fixed) continue;
    EXPECT_TRUE(rule.in_flight == 0 || (rule.in_flight >= 0.5 && rule.in_flight < 2.5));
    EXPECT_TRUE(rule.unfinished == 0 || (rule.unfinished >= 0.5 && rule.unfinished < 3.5));
    EXPECT_TRUE(rule.w_fits >= 0 && rule.w_fits < 1);
    EXPECT_TRUE(rule.noise >= 0 && rule.noise < 0.3);
    EXPECT_TRUE(rule.fuse >= 0 && rule.fuse < 1);
  }
  // A part of them has each of the limits, and each of the rest.
  const auto part = [&](const auto& with) { return std::count_if(rules.begin() + fixed, rules.end(), with); };
  EXPECT_NEAR(part([](const auto& r) { return r.in_flight == 0; }), 306 / 4, 30);
  EXPECT_NEAR(part([](const auto& r) { return r.unfinished == 0; }), 306 / 2, 30);
  EXPECT_NEAR(part([](const auto& r) { return r.w_fits == 0; }), 306 / 3, 30);
  EXPECT_NEAR(part([](const auto& r) { return r.fuse == 0; }), 306 / 2, 30);
  EXPECT_EQ(key(greedy_rules(120, 1).back()), key(rules[119]));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
