// Tests the closed formulas of the paper (arXiv 2405.18047), formulas derived under its assumption, the byte cap, and
// bad input. The assumption is that forward, p1 and p2 take one unit each, and messages take no time.
#include "twobp/schedule/simulate/simulate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include <gtest/gtest.h>

#include "tests/schedule/named.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/for_training.h"

namespace twobp::TWOBP_FILE {
namespace {

Simulation unit_costs(const std::string& name, int stages, int micro_batches, P2Policy policy, double cap = 0) {
  SimulationOptions options;
  if (cap > 0) options.cap_per_rank.assign(stages, cap);
  return simulate(make_schedule(name, stages, micro_batches, policy), std::vector<StageCost>(stages), options);
}

Simulation preset(const std::string& name, int stages, P2Policy policy) {
  return unit_costs(name, stages, default_micro_batches(name, stages), policy);
}

double bubble(const std::string& name, int stages, P2Policy policy) {
  return preset(name, stages, policy).bubble_ratio();
}

// A reference model of half the layers of each stage: beside these, F takes two units. In stages of its own, it fills
// the wait at the beginning.
TEST(FrozenStages, FillTheWaitAtTheBeginning) {
  const auto seconds = [](const Schedule& schedule, const std::vector<StageCost>& costs) {
    return simulate(schedule, costs).step_seconds;
  };
  StageCost beside;
  beside.forward = 2;
  StageCost frozen;
  frozen.backward_p1 = frozen.backward_p2 = frozen.stash_bytes = 0;
  for (const auto& [micro_batches, before, after] :
       std::vector<std::tuple<int, double, double>>{{2, 10, 9}, {4, 18, 17}}) {
    const Schedule plain = make_schedule("1f1b", 2, micro_batches, P2Policy::kFill);
    EXPECT_EQ(seconds(plain, {beside, beside}), before);
    EXPECT_EQ(seconds(after_frozen_stages(plain), {frozen, frozen, {}, {}}), after);
  }
}

// In the waits before I, too, if the next batch is known: then no rank waits for anything.
TEST(FrozenStages, FillTheWaitsBeforeIForTheNextStep) {
  StageCost frozen;
  frozen.backward_p1 = frozen.backward_p2 = frozen.stash_bytes = 0;
  const std::vector<StageCost> costs{frozen, frozen, {}, {}};
  for (const int micro_batches : {2, 4}) {
    const Schedule schedule = after_frozen_stages(make_schedule("1f1b", 2, micro_batches, P2Policy::kFill));
    SimulationOptions options;
    EXPECT_EQ(simulate(schedule, costs, options).step_seconds, 4 * micro_batches + 1);
    EXPECT_EQ(forwards_ahead(schedule, costs, options, 2), 1);
    EXPECT_EQ(forwards_ahead(schedule, costs, options, 0), 0);
    options.ahead = 1;
    const Simulation ahead = simulate(schedule, costs, options);
    EXPECT_EQ(ahead.step_seconds, 4 * micro_batches);
    EXPECT_EQ(ahead.ranks[0].busy, 4 * micro_batches);
    EXPECT_EQ(ahead.ranks[1].busy, 4 * micro_batches);
  }
  const Schedule many = after_frozen_stages(make_schedule("1f1b", 2, 60, P2Policy::kFill));
  EXPECT_EQ(forwards_ahead(many, costs, {}, 2), 0) << "it would gain less than 2 %";
  for (const int ranks : {3, 4, 8}) {
    std::vector<StageCost> all(2 * ranks);
    std::fill_n(all.begin(), ranks, frozen);
    const Schedule schedule = after_frozen_stages(make_schedule("1f1b", ranks, ranks, P2Policy::kFill));
    SimulationOptions options;
    options.ahead = ranks - 1;
    EXPECT_EQ(simulate(schedule, all, options).step_seconds, 5 * ranks - 2);
    options.ahead = 0;
    EXPECT_EQ(simulate(schedule, all, options).step_seconds, 5 * ranks - 1);
  }
}

// Where W costs nothing, the last rank runs F of the next step when it has done all else.
TEST(FrozenStages, FillTheWaitsOfAdapters) {
  StageCost trained;
  trained.backward_p2 = 0;
  StageCost frozen = trained;
  frozen.backward_p1 = frozen.stash_bytes = 0;
  const Schedule plain = make_schedule("1f1b", 2, 2, P2Policy::kFill);
  const Schedule schedule = after_frozen_stages(plain);
  const std::vector<StageCost> costs{frozen, frozen, trained, trained};
  EXPECT_EQ(simulate(plain, {trained, trained}).step_seconds, 6);
  SimulationOptions options;
  EXPECT_EQ(simulate(schedule, costs, options).step_seconds, 8);
  EXPECT_EQ(forwards_ahead(schedule, costs, options, 1), 1);
  EXPECT_EQ(forwards_ahead(schedule, costs, options, 2), 2);
  options.ahead = 2;
  options.message_holder = MessageHolder::kSender;
  EXPECT_EQ(simulate(schedule, costs, options).step_seconds, 6) << "as without a reference";
}

TEST(FrozenStages, RunAheadOfTheNextStepOnlyIfThereAreSome) {
  const std::vector<StageCost> costs(4);
  SimulationOptions options;
  options.ahead = 1;
  EXPECT_THROW(simulate(make_schedule("1f1b", 4, 2, P2Policy::kFill), costs, options), Error);
  options.ahead = 3;  // more than there are frozen stages
  EXPECT_THROW(simulate(after_frozen_stages(make_schedule("1f1b", 2, 2, P2Policy::kFill)), costs, options), Error);
}

// They hold nothing after F but their outputs, until the next stage takes them.
TEST(FrozenStages, KeepNoActivations) {
  StageCost frozen;
  frozen.backward_p1 = frozen.backward_p2 = frozen.stash_bytes = 0;
  frozen.activation_bytes = 50;
  const Schedule schedule = after_frozen_stages(make_schedule("1f1b", 1, 3, P2Policy::kOff));
  const std::vector<StageCost> costs{frozen, {}};
  const Simulation simulation = simulate(schedule, costs);
  EXPECT_EQ(simulation.ranks[0].peak_bytes, 50);
  EXPECT_EQ(simulation.ranks[0].peak_in_flight, 1);
}

class Formulas : public testing::TestWithParam<int> {};

TEST_P(Formulas, HoldForStandardBackpropagation) {
  const double n = GetParam();
  EXPECT_DOUBLE_EQ(bubble("naive", GetParam(), P2Policy::kOff), (n - 1) / n);
  EXPECT_DOUBLE_EQ(bubble("gpipe", GetParam(), P2Policy::kOff), (n - 1) / (2 * n - 1));
  EXPECT_DOUBLE_EQ(bubble("1f1b-1", GetParam(), P2Policy::kOff), (n - 1) / (2 * n - 1));
  EXPECT_DOUBLE_EQ(bubble("1f1b-2", GetParam(), P2Policy::kOff), (n - 1) / (3 * n - 1));
}

TEST_P(Formulas, HoldForNaive) {
  const double n = GetParam();
  for (P2Policy policy : {P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
    EXPECT_DOUBLE_EQ(bubble("naive", GetParam(), policy), 2 * (n - 1) / (2 * n + 1));
  }
}

TEST_P(Formulas, HoldForP2AtTheEnd) {
  const double n = GetParam();
  EXPECT_DOUBLE_EQ(bubble("gpipe", GetParam(), P2Policy::kEnd), 2 * (n - 1) / (5 * n - 2));
  EXPECT_DOUBLE_EQ(bubble("1f1b-1", GetParam(), P2Policy::kEnd), 2 * (n - 1) / (5 * n - 2));
}

TEST_P(Formulas, HoldForCooldownAndFill) {
  const double n = GetParam();
  EXPECT_DOUBLE_EQ(bubble("1f1b-1", GetParam(), P2Policy::kCooldown), (n - 1) / (4 * n - 1));
  EXPECT_DOUBLE_EQ(bubble("1f1b-1", GetParam(), P2Policy::kFill), (n - 1) / (4 * n - 1));
  EXPECT_DOUBLE_EQ(bubble("1f1b-2", GetParam(), P2Policy::kFill), (n - 1) / (7 * n - 1));
}

TEST_P(Formulas, HoldForOneForwardOneBackwardWithAnyMicroBatches) {
  const int n = GetParam();
  for (int m = n; m <= 5 * n; ++m) {
    const double standard = n - 1 + m;
    EXPECT_DOUBLE_EQ(unit_costs("1f1b", n, m, P2Policy::kOff).bubble_ratio(), (n - 1) / standard);
    const Simulation filled = unit_costs("1f1b", n, m, P2Policy::kFill);
    EXPECT_EQ(filled.step_seconds, std::max(3 * m + n - 1, 2 * m + 2 * n - 1)) << n << ' ' << m;
    EXPECT_DOUBLE_EQ(filled.bubble_ratio(), (n - 1) / (n - 1 + 3.0 * m));
  }
  // With fewer micro-batches than stages, the path of the last micro-batch through all stages and back sets the pace.
  for (int m = 1; m < n; ++m) {
    EXPECT_EQ(unit_costs("1f1b", n, m, P2Policy::kFill).step_seconds, std::max(3 * m + n - 1, 2 * m + 2 * n - 1))
        << n << ' ' << m;
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, Formulas, testing::Values(1, 2, 4, 8));

TEST(Memory, ACapOfNMicroBatchesCostsNoTime) {
  for (const auto& [stages, micro_batches] : {std::pair{2, 4}, std::pair{4, 8}, std::pair{8, 16}}) {
    const Simulation standard = unit_costs("1f1b", stages, micro_batches, P2Policy::kOff);
    const Simulation free = unit_costs("1f1b", stages, micro_batches, P2Policy::kFill);
    const Simulation capped = unit_costs("1f1b", stages, micro_batches, P2Policy::kFill, stages);
    EXPECT_EQ(capped.step_seconds, free.step_seconds);
    EXPECT_EQ(standard.ranks[0].peak_in_flight, stages);
    EXPECT_EQ(standard.ranks[0].peak_bytes, stages);
    for (int rank = 0; rank < stages; ++rank) {
      EXPECT_EQ(standard.ranks[rank].peak_in_flight, stages - rank);
      EXPECT_LE(capped.ranks[rank].peak_bytes, stages);
      EXPECT_LE(capped.ranks[rank].peak_in_flight, stages);
    }
    // Without a limit, every stage holds all micro-batches at the end.
    for (const auto& rank : free.ranks) EXPECT_EQ(rank.peak_in_flight, micro_batches);
  }
}

TEST(Memory, CapHoldsUnderEveryPolicyExceptForOpsThatNeverFit) {
  for (P2Policy policy : {P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
    const Simulation capped = unit_costs("1f1b", 4, 16, policy, 4);
    for (const auto& rank : capped.ranks) EXPECT_LE(rank.peak_bytes, 4);
    // The first stage runs 4 forwards before there is any W.
    EXPECT_EQ(unit_costs("1f1b", 4, 16, policy, 1).ranks[0].peak_bytes, 4);
  }
}

// A policy holds W back only while there is room. Under the cap of standard backpropagation, no policy takes longer
// than standard backpropagation.
TEST(Memory, ACapThatForcesWUsesWaits) {
  for (int stages = 2; stages <= 6; ++stages) {
    const int m = 2 * stages;
    const auto seconds = [&](P2Policy policy, double cap) {
      return unit_costs("1f1b", stages, m, policy, cap).step_seconds;
    };
    for (const P2Policy policy : {P2Policy::kEnd, P2Policy::kCooldown}) {
      EXPECT_LT(seconds(policy, stages), seconds(P2Policy::kOff, 0)) << stages << ' ' << policy_name(policy);
      EXPECT_EQ(seconds(policy, 2 * m), seconds(policy, 0)) << "as written";
    }
    for (int cap = stages; cap < m; ++cap) {
      EXPECT_EQ(seconds(P2Policy::kEnd, cap), seconds(P2Policy::kFill, cap)) << stages << ", cap " << cap;
    }
  }
}

// What the rank holds at the end of each op. An output counts until it is sent, an input until its op begins.
TEST(Memory, IsInTheTimeline) {
  std::vector<StageCost> costs(2);
  for (StageCost& cost : costs) {
    cost.activation_bytes = 10;
    cost.stash_bytes = 4;
    cost.output_bytes = 3;
    cost.input_gradient_bytes = 2;
  }
  const auto held = [&](P2Policy policy, int rank) {
    std::vector<double> bytes;
    const Simulation simulation = simulate(make_schedule("gpipe", 2, 1, policy), costs);
    for (const SimulatedOp& op : simulation.ranks[rank].timeline) bytes.push_back(op.held_bytes);
    return bytes;
  };
  EXPECT_EQ(held(P2Policy::kEnd, 0), (std::vector<double>{10 + 3, 4, 0}));
  EXPECT_EQ(held(P2Policy::kEnd, 1), (std::vector<double>{10, 4 + 2, 0}));
  // B frees its bytes at its end.
  EXPECT_EQ(held(P2Policy::kOff, 1), (std::vector<double>{10, 10, 2}));
}

TEST(Idle, IsSplitByCause) {
  const Simulation end = preset("1f1b-1", 4, P2Policy::kEnd);
  const auto idle = [](const RankSimulation& rank, IdleCause cause) { return rank.idle[static_cast<int>(cause)]; };
  EXPECT_EQ(idle(end.ranks[3], IdleCause::kStartUp), 3);
  EXPECT_EQ(idle(end.ranks[0], IdleCause::kNothing), 3);  // before its first I there is no W
  EXPECT_EQ(idle(end.ranks[0], IdleCause::kMessage), 3);
  EXPECT_EQ(idle(end.ranks[3], IdleCause::kTail), 3);
  const Simulation fill = preset("1f1b-1", 4, P2Policy::kFill);
  const Simulation off = preset("1f1b-1", 4, P2Policy::kOff);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(idle(fill.ranks[rank], IdleCause::kMessage), 0);
    EXPECT_EQ(idle(off.ranks[rank], IdleCause::kMessage), 0);  // no W is ever pending
    EXPECT_EQ(idle(fill.ranks[rank], IdleCause::kStartUp), rank);
  }
  EXPECT_EQ(idle_cause_name(IdleCause::kNothing), "nothing to fill");
}

TEST(Simulate, RoundingErrorsAddNoPiece) {
  std::vector<StageCost> costs(2);
  costs[0].backward_p2 = 0.3;
  costs[0].p2_units = 3;
  costs[0].backward_p1 = 0.1;
  costs[1].backward_p1 = 0.4;
  for (auto& cost : costs) cost.forward = 0.1;
  const Simulation result = simulate(make_schedule("gpipe", 2, 2, P2Policy::kFill), costs);
  EXPECT_NEAR(result.ranks[0].timeline[3].end - result.ranks[0].timeline[3].begin, 0.3, 1e-12);
  EXPECT_EQ(result.ranks[0].timeline[4].op, Op::kBackwardP1);
}

TEST(Simulate, OptimizerRunsAfterTheLastInstructionOfARank) {
  std::vector<StageCost> costs(2);
  costs[0].optimizer = 1;
  costs[1].optimizer = 5;
  const Simulation result = simulate(make_schedule("1f1b", 2, 2, P2Policy::kOff), costs);
  EXPECT_EQ(result.step_seconds, 7 + 5);  // rank 1 runs its optimizer from 7, rank 0 from 9
  EXPECT_EQ(result.ranks[0].busy, 7);
  EXPECT_EQ(result.ranks[1].busy, 11);
}

TEST(Simulate, ForwardOnlyHoldsNothing) {
  std::vector<StageCost> costs(3);
  for (auto& cost : costs) cost.optimizer = 1;
  const Simulation result = simulate(make_forward_schedule({0, 1, 2}, 5), costs);
  EXPECT_EQ(result.step_seconds, 7);
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.peak_bytes, 1);
}

TEST(Simulate, FrozenStageHasNoW) {
  std::vector<StageCost> costs(2);
  costs[0].backward_p2 = 0;
  costs[0].p2_units = 0;  // the sum over the layers
  costs[0].layers = {{.p2_units = 0, .forward_held = 2, .p1_held = -2}};
  for (const P2Policy policy : kPolicies) {
    const Simulation result = simulate(make_schedule("1f1b", 2, 4, policy), costs);
    EXPECT_EQ(result.ranks[0].busy, 4 * 2) << policy_name(policy);
    EXPECT_EQ(result.ranks[0].peak_bytes, 4) << policy_name(policy);  // two micro-batches, as in 1F1B
    EXPECT_EQ(result.ranks[0].peak_in_flight, 2) << policy_name(policy);
  }
}

TEST(Simulate, RefusesBadInput) {
  const Schedule schedule = make_schedule("gpipe", 2, 2, P2Policy::kOff);
  EXPECT_THROW(simulate(schedule, std::vector<StageCost>(1)), Error);
  for (double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    std::vector<StageCost> costs(2);
    costs[1].backward_p1 = bad;
    const std::string error = error_of([&] { simulate(schedule, costs); });
    EXPECT_NE(error.find("stage 1: backward_p1"), std::string::npos) << error;
    SimulationOptions options;
    options.message_seconds = bad;
    EXPECT_THROW(simulate(schedule, std::vector<StageCost>(2), options), Error);
    options = {};
    options.cap_per_rank = {1, bad};
    EXPECT_THROW(simulate(schedule, std::vector<StageCost>(2), options), Error);
  }
  std::vector<StageCost> costs(2);
  costs[0].p2_units = 0;
  EXPECT_THROW(simulate(schedule, costs), Error);
  SimulationOptions options;
  options.cap_per_rank = {1};
  EXPECT_THROW(simulate(schedule, std::vector<StageCost>(2), options), Error);
  Schedule broken = schedule;
  broken.ranks[0].pop_back();
  EXPECT_THROW(simulate(broken, std::vector<StageCost>(2)), Error);
}

TEST(UnequalMicroBatches, RowsMustDivideThem) {
  const Schedule schedule = make_schedule("1f1b", 2, 4, P2Policy::kOff);
  for (const int rows : {1, 2, 4}) simulate(schedule, std::vector<StageCost>(rows * 2));
  const std::vector<std::pair<int, std::string>> faults = {
      {0, "0 rows"}, {3, "3 costs"}, {6, "3 rows"}, {16, "8 rows"}};
  for (const auto& [costs, given] : faults)
    test::expect_error(
        [&] { simulate(schedule, std::vector<StageCost>(costs)); },
        {"needs 2 costs, one for each stage", "each of the 4 micro-batches", "divide 4", concat("got ", given)});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
