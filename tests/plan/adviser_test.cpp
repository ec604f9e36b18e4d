// Tests the adviser's sentences. The costs are chosen so that each verdict and each failure signature occurs.
#include "twobp/plan/adviser.h"

#include "tests/schedule/support.h"
#include "twobp/core/text.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
namespace {

AdviceRequest equal_stages(int ranks, int micro_batches) {
  AdviceRequest request;
  request.stages = request.ranks = ranks;
  request.micro_batches = micro_batches;
  request.costs.resize(ranks);
  return request;
}

void expect_signatures(const Advice& advice, bool memory, bool p1, bool unequal) {
  EXPECT_EQ(advice.out_of_memory_in_p2, memory);
  EXPECT_EQ(advice.p1_longer_than_idle, p1);
  EXPECT_EQ(advice.unequal_p1_and_p2, unequal);
  EXPECT_EQ(advice.sentences.size(), 1U + (memory ? 1 : 0) + (p1 ? 1 : 0) + (unequal ? 1 : 0));
}

TEST(Adviser, SaysByHowMuchItHelps) {
  const Advice advice = advise(equal_stages(4, 4));
  // For 1F1B-1 of arXiv 2405.18047 at N = 4, the speed-up is 7/5 and the bubbles are 3/7 and 3/15.
  EXPECT_NEAR(advice.speed_up, 1.4, 1e-9);
  EXPECT_NEAR(advice.bubble_off, 3.0 / 7, 1e-9);
  EXPECT_NEAR(advice.bubble, 0.2, 1e-9);
  EXPECT_TRUE(advice.helps);
  expect_signatures(advice, false, false, false);
  expect_contains(advice.sentences[0], {"2BP helps", "1.40x", "0.429", "0.200"});
}

TEST(Adviser, CountsTheTimeOfMessages) {
  AdviceRequest request = equal_stages(4, 4);
  request.options.message_seconds = 1;
  EXPECT_GT(advise(request).bubble_off, 3.0 / 7 + 0.01);
}

// Signature 1: all stages keep all tensors of W, and these exceed the memory.
TEST(Adviser, ReportsMemoryThatP2Exceeds) {
  AdviceRequest request = equal_stages(4, 8);
  request.policy = P2Policy::kFill;
  for (auto& cost : request.costs) {
    cost.activation_bytes = 10;
    cost.stash_bytes = 14;
    cost.fixed_bytes = 100;
  }
  request.memory = 146;  // p2 off needs 4 x 10 on the first stage
  const Advice advice = advise(request);
  EXPECT_TRUE(advice.out_of_memory_in_p2);
  EXPECT_FALSE(advice.p1_longer_than_idle);
  EXPECT_FALSE(advice.unequal_p1_and_p2);
  EXPECT_LE(advice.memory_factor, 146.0 / 140);
  expect_contains(advice.sentences.at(1), {"failure signature 1", "out of memory in p2", "146 B", "140 B", "early"});
  // The plan's own caps say nothing about what a rank would need without them.
  request.options.cap_per_rank.assign(4, 46);
  EXPECT_EQ(advise(request).sentences, advice.sentences);
  request.memory = 1000;
  EXPECT_FALSE(advise(request).out_of_memory_in_p2);
}

// Running W early does not help, because the stash of one micro-batch alone is too large.
TEST(Adviser, ReportsMemoryThatEveryOrderExceeds) {
  AdviceRequest request = equal_stages(2, 2);
  for (auto& cost : request.costs) {
    cost.activation_bytes = 10;
    cost.stash_bytes = 50;
  }
  request.memory = 30;
  const Advice advice = advise(request);
  EXPECT_TRUE(advice.out_of_memory_in_p2);
  EXPECT_FALSE(advice.helps);
  expect_contains(advice.sentences.at(0), {"does not fit"});
  expect_contains(advice.sentences.at(1), {"even with W run as early"});
  request.memory = 5;
  expect_contains(advise(request).sentences.at(0), {"cannot help", "5 B"});
}

// Signature 2: the last stage is always busy with a long p1.
TEST(Adviser, ReportsAP1LongerThanTheIdleTime) {
  AdviceRequest request = equal_stages(4, 8);
  for (auto& cost : request.costs) cost.forward = cost.backward_p1 = cost.backward_p2 = 0.01;
  request.costs[3].backward_p1 = 5;
  const Advice advice = advise(request);
  EXPECT_LT(advice.speed_up, 1.01);
  EXPECT_TRUE(advice.p1_longer_than_idle);
  EXPECT_FALSE(advice.helps);
  expect_contains(advice.sentences.at(0),
                  {"does not help", "p1 of stage 3 (5.00 s)", "longer than the idle time", "no gain"});
  expect_contains(advice.sentences.at(1), {"failure signature 2"});
  for (auto& cost : request.costs) cost.forward = cost.backward_p1 = cost.backward_p2 = 1e-5;
  request.costs[3].backward_p1 = 5e-3;
  expect_contains(advise(request).sentences.at(0), {"p1 of stage 3 (5.00 ms)"});
}

// A short W fills waits that are long enough, and nothing is gained.
TEST(Adviser, SaysThatWaitsDoNotDelayTheStep) {
  AdviceRequest request = equal_stages(4, 4);
  for (auto& cost : request.costs) cost.backward_p2 = 0.001;
  const Advice advice = advise(request);
  expect_signatures(advice, false, false, false);
  expect_contains(advice.sentences[0], {"does not help", "1.00x", "the waits that W fills do not delay the step"});
}

// The busiest rank counts, and of its stages the one with the longest p1.
TEST(Adviser, LooksForALongP1OnTheBusiestRank) {
  for (int long_one = 0; long_one < 4; ++long_one) {
    AdviceRequest request = equal_stages(4, 8);
    for (auto& cost : request.costs) cost.forward = cost.backward_p1 = cost.backward_p2 = 0.01;
    request.costs[long_one].backward_p1 = 5;
    const Advice advice = advise(request);
    EXPECT_TRUE(advice.p1_longer_than_idle);
    expect_contains(advice.sentences.at(0), {concat("p1 of stage ", long_one, " (5.00 s)")});
  }
  AdviceRequest request = equal_stages(4, 4);
  request.schedule = "interleaved-1f1b";
  request.ranks = 2;
  for (auto& cost : request.costs) cost.forward = cost.backward_p1 = cost.backward_p2 = 0.01;
  request.costs[1].backward_p1 = 4;  // stages 1 and 3 are on rank 1
  request.costs[3].backward_p1 = 5;
  expect_contains(advise(request).sentences.at(0), {"p1 of stage 3 (5.00 s)"});
}

// Signature 3: each rank has the same total work. One rank has most of it in p1, the others in p2.
TEST(Adviser, ReportsUnequalP1AndP2) {
  AdviceRequest request = equal_stages(4, 8);
  for (int s = 0; s < 4; ++s) {
    request.costs[s].forward = 1;
    request.costs[s].backward_p1 = s == 3 ? 5 : 1;
    request.costs[s].backward_p2 = s == 3 ? 1 : 5;
  }
  const Advice advice = advise(request);
  EXPECT_TRUE(advice.unequal_p1_and_p2);
  expect_contains(advice.sentences.back(),
                  {"failure signature 3", "p1 is 2.50x its mean on rank 3", "p2 1.25x", "all together 1.00x"});
  // Against stages that all have the mean of p1 (2) and p2 (4).
  std::vector<StageCost> equal(4);
  for (StageCost& cost : equal) {
    cost.forward = 1;
    cost.backward_p1 = 2;
    cost.backward_p2 = 4;
  }
  const Schedule schedule = make_schedule("1f1b", 4, 8, request.policy);
  expect_contains(advice.sentences.back(),
                  {"would be " + fixed(simulate(schedule, equal).bubble_ratio(), 3),
                   "in place of " + fixed(simulate(schedule, request.costs).bubble_ratio(), 3)});
}

TEST(Adviser, SaysThatOneRankHasNothingToFill) {
  const Advice advice = advise(equal_stages(1, 4));
  EXPECT_FALSE(advice.helps);
  expect_signatures(advice, false, false, false);
  expect_contains(advice.sentences[0], {"does not help", "next to nothing to fill"});
}

TEST(Adviser, AdvisesOnVShapedSchedules) {
  AdviceRequest request;
  request.schedule = "zb-v";
  request.policy = P2Policy::kPlaced;
  request.ranks = 4;
  request.stages = 8;
  request.micro_batches = 8;
  request.costs.resize(8);
  const Advice advice = advise(request);
  EXPECT_TRUE(advice.helps);
  expect_contains(advice.sentences[0], {"zb-v, p2 placed"});
}

TEST(Adviser, RejectsBadInput) {
  AdviceRequest request = equal_stages(2, 2);
  request.policy = P2Policy::kOff;
  expect_contains(error_of([&] { advise(request); }), {"p2 off"});
  request.policy = P2Policy::kFill;
  request.schedule = "1f1";
  expect_contains(error_of([&] { advise(request); }), {"'1f1b'"});
  request.schedule = "1f1b";
  request.costs.pop_back();
  expect_contains(error_of([&] { advise(request); }), {"costs"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
