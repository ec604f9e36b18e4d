// Tests steps without a barrier: exact periods for equal costs, and a step that begins where the previous one ended,
// compared with one schedule that contains both.
#include <algorithm>

#include <gtest/gtest.h>

#include "tests/schedule/costs.h"
#include "tests/schedule/named.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/check/walk.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/for_training.h"

namespace twobp {
namespace {

StepPeriods equal_costs(const std::string& name, int ranks, int micro_batches, P2Policy policy,
                        NormNeed norm = NormNeed::kNone, double optimizer = 0) {
  const int stages = ranks * usual_stages_per_rank(named_schedule(name).placement);
  std::vector<StageCost> costs(stages);
  for (StageCost& cost : costs) cost.optimizer = optimizer;
  return step_periods(make_schedule(name, stages, micro_batches, policy), costs, {}, norm);
}

TEST(StepPeriods, ZeroBubbleSchedulesLoseTheirRamps) {
  for (const int n : {1, 2, 4, 8, 32}) {
    for (const int m : {2 * n, 4 * n}) {
      const StepPeriods h2 = equal_costs("zb-h2", n, m, P2Policy::kPlaced);
      EXPECT_DOUBLE_EQ(h2.barrier, 3 * m + n - 1) << n << ' ' << m;
      EXPECT_DOUBLE_EQ(h2.overlap, 3 * m) << n << ' ' << m;
      EXPECT_NEAR(h2.idle, 0, 1e-12) << n << ' ' << m;
      const StepPeriods v = equal_costs("zb-v", n, m, P2Policy::kPlaced);
      EXPECT_DOUBLE_EQ(v.barrier, 6 * m + n - 1) << n << ' ' << m;
      EXPECT_DOUBLE_EQ(v.overlap, 6 * m) << n << ' ' << m;
      EXPECT_NEAR(v.idle, 0, 1e-12) << n << ' ' << m;
    }
  }
}

// The first rank begins and ends every step.
TEST(StepPeriods, OneForwardOneBackwardGainsNothing) {
  for (const int n : {1, 2, 4, 8}) {
    for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
      const StepPeriods periods = equal_costs("1f1b", n, 2 * n, policy);
      EXPECT_DOUBLE_EQ(periods.gain(), 1) << n;
      EXPECT_DOUBLE_EQ(periods.overlap, periods.barrier) << n;
    }
  }
}

// In an evaluation the first ranks run ahead of a slow third one, by two steps. Then all keep its time. The times are
// short, because a step may take less than a second.
TEST(StepPeriods, AreThoseOfTheSlowestRankInTheLongRun) {
  std::vector<StageCost> costs(3);
  costs[0].forward = costs[1].forward = 0.1;
  costs[2].forward = 0.3;
  const StepPeriods periods = step_periods(make_forward_schedule({0, 1, 2}, 2), costs);
  EXPECT_DOUBLE_EQ(periods.barrier, 0.1 + 0.1 + 2 * 0.3);
  EXPECT_NEAR(periods.overlap, 2 * 0.3, 1e-9);
  EXPECT_NEAR(periods.idle, 2 * (1 - 0.2 / 0.6) / 3, 1e-9);
  // Of two ranks, the first takes 0.2 for its second step, and the second 0.6.
  costs.erase(costs.begin());
  for (const double unit : {1.0, 1e-6, 1e6}) {
    std::vector<StageCost> in_units = costs;
    for (StageCost& cost : in_units) cost.forward *= unit;
    EXPECT_NEAR(step_periods(make_forward_schedule({0, 1}, 2), in_units).overlap, 2 * 0.3 * unit, 1e-9 * unit);
  }
}

// Each rank's optimizer runs before it begins the next step.
TEST(StepPeriods, IncludeTheOptimizer) {
  const StepPeriods h2 = equal_costs("zb-h2", 4, 8, P2Policy::kPlaced, NormNeed::kNone, 0.5);
  EXPECT_DOUBLE_EQ(h2.barrier, 24 + 3 + 0.5);
  EXPECT_DOUBLE_EQ(h2.overlap, 24 + 0.5);
}

// The norm is known before any rank has run the F with which it begins.
TEST(StepPeriods, ANormCostsNothing) {
  for (const int n : {2, 4, 8}) {
    const int m = 2 * n;
    EXPECT_DOUBLE_EQ(equal_costs("zb-h2", n, m, P2Policy::kPlaced, NormNeed::kAfterForwards).overlap, 3 * m);
    EXPECT_DOUBLE_EQ(equal_costs("zb-v", n, m, P2Policy::kPlaced, NormNeed::kAfterForwards).overlap, 6 * m);
    EXPECT_DOUBLE_EQ(equal_costs("1f1b", n, m, P2Policy::kFill, NormNeed::kAfterForwards).gain(), 1);
  }
}

// No rank gets beyond its leading F before the norm is known.
TEST(StepPeriods, WaitForTheNorm) {
  const Schedule schedule = make_schedule("zb-h2", 4, 8, P2Policy::kPlaced);
  SimulationOptions options;
  options.norm_known = 100;
  const Simulation late = simulate(schedule, std::vector<StageCost>(4), options);
  const Simulation soon = simulate(schedule, std::vector<StageCost>(4));
  // The last rank has only F of the last stage.
  EXPECT_DOUBLE_EQ(late.ranks[3].timeline.front().begin, 100);
  EXPECT_DOUBLE_EQ(late.ranks[0].timeline.front().begin, 0);
  EXPECT_DOUBLE_EQ(late.step_seconds, soon.step_seconds + 100 - soon.ranks[3].timeline.front().begin);
  const std::vector<StageCost> short_ones(4, {.forward = 0.1, .backward_p1 = 0.1, .backward_p2 = 0.1});
  options.norm_known = 0.9;
  EXPECT_DOUBLE_EQ(simulate(schedule, short_ones, options).ranks[3].timeline.front().begin, 0.9);
}

TEST(LeadingForwards, EndBeforeTheFirstBackward) {
  const LeadingForwards leading = leading_forwards(make_schedule("1f1b", 3, 6, P2Policy::kFill));
  // Rank 0 has F SEND three times, then RECV_B. Rank 1 has RECV F SEND twice, then RECV_B. Rank 2 has RECV, then F of
  // the last stage.
  EXPECT_EQ(leading.end, (std::vector<size_t>{6, 6, 1}));
  EXPECT_TRUE(leading.unreceived[0].empty());
  EXPECT_EQ(text_of(leading.unreceived[1]), "1RECV_F2");
  EXPECT_EQ(text_of(leading.unreceived[2]), "2RECV_F1");
}

// In every schedule, each received message was sent before, and each sent but unreceived message is listed.
TEST(LeadingForwards, MessagesAddUp) {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    const Schedule schedule = random_named_schedule(random, 6, 12);
    const LeadingForwards leading = leading_forwards(schedule);
    std::vector<std::string> sent;
    std::vector<std::string> received;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      for (size_t i = 0; i < leading.end[rank]; ++i) {
        const Instruction& instruction = schedule.ranks[rank][i];
        EXPECT_TRUE(instruction.op == Op::kForward || instruction.op == Op::kSendForward ||
                    instruction.op == Op::kRecvForward);
        EXPECT_FALSE(instruction.op == Op::kForward && schedule.is_last(instruction.stage));
        if (instruction.op == Op::kRecvForward) received.push_back(to_string(instruction));
        if (instruction.op == Op::kSendForward)
          sent.push_back(to_string({Op::kRecvForward, instruction.stage + 1, instruction.micro_batch, 1}));
      }
      for (const Instruction& instruction : leading.unreceived[rank]) {
        EXPECT_EQ(schedule.rank_of_stage[instruction.stage], static_cast<int>(rank));
        received.push_back(to_string(instruction));
      }
    }
    std::sort(sent.begin(), sent.end());
    std::sort(received.begin(), received.end());
    EXPECT_EQ(sent, received) << schedule.name;
  }
}

TEST(StepPeriods, HandleZeroCosts) {
  StageCost none;
  none.forward = none.backward_p1 = none.backward_p2 = 0;
  const StepPeriods periods =
      step_periods(make_schedule("1f1b", 2, 4, P2Policy::kFill), std::vector<StageCost>(2, none));
  EXPECT_EQ(periods.gain(), 1);
  EXPECT_EQ(periods.idle, 0);
}

// The schedule `twice` has the step twice, the second time with other micro-batches. That is two steps without a
// barrier.
TEST(StepPeriods, BeginWhereThePreviousStepEnded) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    const int ranks = random_int(random, 1, 4);
    const int stages = ranks + random_int(random, 0, 4);
    const Schedule once =
        add_communication(random_schedule(random, stages, random_int(random, 1, 5), ranks, /*place_w=*/true));
    Schedule twice = once;
    twice.micro_batches *= 2;
    for (size_t rank = 0; rank < once.ranks.size(); ++rank) {
      for (Instruction instruction : once.ranks[rank]) {
        instruction.micro_batch += once.micro_batches;
        twice.ranks[rank].push_back(instruction);
      }
    }
    std::vector<StageCost> costs = random_costs(random, stages, /*layered=*/false);
    // The optimizer runs once a step, and `twice` counts as one step.
    for (StageCost& cost : costs) cost.optimizer = 0;
    SimulationOptions options;
    options.message_seconds = random_real(random, 0, 1);
    const Simulation both = simulate(twice, costs, options);
    for (const RankSimulation& rank : simulate(once, costs, options).ranks) options.begin.push_back(rank.end);
    const Simulation second = simulate(once, costs, options);
    for (size_t rank = 0; rank < once.ranks.size(); ++rank) {
      EXPECT_NEAR(second.ranks[rank].end, both.ranks[rank].end, 1e-9) << round;
      double idle = 0;
      for (const double cause : second.ranks[rank].idle) idle += cause;
      EXPECT_NEAR(second.ranks[rank].busy + idle, second.step_seconds - options.begin[rank], 1e-9) << round;
    }
  }
}

TEST(StepPeriods, RefuseABeginningBeforeTheStart) {
  const Schedule schedule = make_schedule("1f1b", 2, 2, P2Policy::kFill);
  SimulationOptions options;
  options.begin = {1};
  expect_contains(error_of([&] { simulate(schedule, std::vector<StageCost>(2), options); }),
                  {"begin has 1 entries for 2 ranks"});
  options.begin = {1, -1};
  expect_contains(error_of([&] { simulate(schedule, std::vector<StageCost>(2), options); }), {"begin holds -1"});
}

}  // namespace
}  // namespace twobp
