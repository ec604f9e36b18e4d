// Tests lowering. Decisions that a run makes become cells, in a simulated or a recorded order.
#include <gtest/gtest.h>

#include "tests/schedule/support.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/csv.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"

namespace twobp::TWOBP_FILE {
namespace {

// This is computed by hand with equal costs of 1. Rank 1 waits only for 1F0. Rank 0 waits for the gradient of
// micro-batch 1 from 4 to 5 and runs 0W0 meanwhile: 1I0 ends at 3, 0I0 and 1F1 run from 3 to 4, and 1I1 runs
// from 4 to 5.
TEST(Lower, WritesFillInItsSimulatedOrder) {
  const Schedule fill = make_schedule("1f1b", 2, 2, P2Policy::kFill);
  const Schedule lowered = lower(fill, simulate(fill, std::vector<StageCost>(2)));
  EXPECT_EQ(text_of(lowered.ranks[0]), "0F0 0F1 0I0 0W0 0I1 0W1");
  EXPECT_EQ(text_of(lowered.ranks[1]), "1F0 1I0 1F1 1I1 1W0 1W1");
  EXPECT_EQ(lowered.policy, P2Policy::kPlaced);
}

// If W is in one piece, the lowered schedule is the simulated run. Times and bytes are equal up to the last
// significant digit.
TEST(Lower, KeepsTheTimesOfTheSimulation) {
  Random random(5);
  for (int i = 0; i < 200; ++i) {
    const int stages = random_int(random, 1, 6);
    const Schedule fill = make_schedule("1f1b", stages, random_int(random, 1, 12), P2Policy::kFill);
    std::vector<StageCost> costs(stages);
    for (StageCost& cost : costs) {
      cost.forward = random_int(random, 1, 5);
      cost.backward_p1 = random_int(random, 1, 5);
      cost.backward_p2 = random_int(random, 1, 5);
    }
    SimulationOptions options;
    if (i % 2 == 1) options.cap_per_rank.assign(stages, 3);
    const Simulation ran = simulate(fill, costs, options);
    const Schedule lowered = add_communication(lower(fill, ran));
    validate(lowered);
    const Simulation again = simulate(lowered, costs);
    EXPECT_DOUBLE_EQ(again.step_seconds, ran.step_seconds);
    for (int rank = 0; rank < stages; ++rank) {
      EXPECT_DOUBLE_EQ(again.ranks[rank].peak_bytes, ran.ranks[rank].peak_bytes);
      EXPECT_EQ(again.ranks[rank].timeline.size(), ran.ranks[rank].timeline.size());
    }
  }
}

// The test takes every named schedule under fill, with W in pieces. The result is valid, keeps the order of
// micro-batches if the schedule does, and survives the text form.
TEST(Lower, PiecesOfWBecomeOneCell) {
  Random random(6);
  for (const NamedSchedule& named : named_schedules()) {
    for (int i = 0; i < 10; ++i) {
      const int ranks = random_int(random, 1, 5);
      const int stages = ranks * usual_stages_per_rank(named.placement);
      const int micro_batches = random_int(random, 1, 12);
      if (!admits(named.name, stages, ranks, micro_batches)) continue;
      const Schedule fill = make_schedule(named.name, stages, micro_batches, P2Policy::kFill, ranks);
      std::vector<StageCost> costs(fill.stages);
      for (StageCost& cost : costs) {
        cost.forward = random_int(random, 1, 5);
        cost.backward_p2 = random_int(random, 1, 5);
        cost.p2_units = random_int(random, 1, 7);
      }
      const Schedule lowered = lower(fill, simulate(fill, costs));
      SCOPED_TRACE(concat(named.name, ", ", ranks, " ranks, ", fill.micro_batches, " micro-batches"));
      ASSERT_NO_THROW(validate(add_communication(lowered)));
      EXPECT_EQ(from_csv(to_csv(lowered), "lowered").ranks, lowered.ranks);
      EXPECT_EQ(lowered.name, named.name);
    }
  }
}

TEST(Lower, TakesARecordedOrder) {
  const Schedule fill = make_schedule("1f1b", 1, 2, P2Policy::kFill);
  // 0F1 has two parts, and a part of 0W0 runs between them. 0W0 has three parts.
  const std::vector<RecordedOp> ran = {{Op::kForward, 0, 0},    {Op::kBackwardP1, 0, 0}, {Op::kBackwardP2, 0, 0},
                                       {Op::kForward, 0, 1},    {Op::kBackwardP2, 0, 0}, {Op::kForward, 0, 1},
                                       {Op::kBackwardP2, 0, 0}, {Op::kBackwardP1, 0, 1}, {Op::kBackwardP2, 0, 1}};
  EXPECT_EQ(text_of(lower(fill, {ran}).ranks[0]), "0F0 0I0 0F1 0W0 0I1 0W1");
}

// B is reported as an I and pieces of W. It is done when the last piece is done.
TEST(Lower, WholeBackwardStaysWhole) {
  const Schedule off = make_schedule("1f1b", 1, 1, P2Policy::kOff);
  const std::vector<std::vector<RecordedOp>> ran = {
      {{Op::kForward, 0, 0}, {Op::kBackwardP1, 0, 0}, {Op::kBackwardP2, 0, 0}, {Op::kBackwardP2, 0, 0}}};
  EXPECT_EQ(text_of(lower(off, ran).ranks[0]), "0F0 0B0");
  EXPECT_EQ(lower(off, ran).policy, P2Policy::kOff);
}

TEST(Lower, RefusesOrdersOfOtherSchedules) {
  const Schedule end = make_schedule("gpipe", 2, 1, P2Policy::kEnd);
  using Order = std::vector<std::vector<RecordedOp>>;
  const auto refusal = [&](const Order& ran) { return error_of([&] { lower(end, ran); }); };
  const Order ran = {{{Op::kForward, 0, 0}, {Op::kBackwardP1, 0, 0}, {Op::kBackwardP2, 0, 0}},
                     {{Op::kForward, 1, 0}, {Op::kBackwardP1, 1, 0}, {Op::kBackwardP2, 1, 0}}};
  EXPECT_EQ(refusal(ran), "");
  expect_contains(refusal({ran[0]}), {"1 ranks", "has 2"});
  Order lacks = ran;
  lacks[1].pop_back();
  expect_contains(refusal(lacks), {"1W0", "never ran"});
  const auto with = [&](int rank, const RecordedOp& op) {
    Order order = ran;
    order[rank].push_back(op);
    return order;
  };
  expect_contains(refusal(with(0, {Op::kForward, 0, 1})), {"no 0F1"});
  expect_contains(refusal(with(0, {Op::kForward, 2, 0})), {"no 2F0"});
  expect_contains(refusal(with(0, {Op::kForward, -1, 0})), {"no -1F0"});
  expect_contains(refusal(with(1, {Op::kForward, 0, 0})), {"0F0 ran on rank 1"});
  expect_contains(refusal(with(0, {Op::kSendForward, 0, 0})), {"no 0SEND_F0"});
  expect_contains(refusal(with(0, {Op::kBackward, 0, 0})), {"has a separate I and W in its place"});
}

TEST(Lower, KeepsFewerMicroBatches) {
  const Schedule schedule = make_schedule("1f1b", 2, 4, P2Policy::kEnd);
  const Schedule fewer = keep_micro_batches(schedule, 3);
  validate(fewer);
  EXPECT_EQ(fewer.micro_batches, 3);
  EXPECT_EQ(text_of(lower(fewer).ranks[1]), "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2");
  EXPECT_EQ(keep_micro_batches(schedule, 4).ranks, schedule.ranks);
  expect_contains(error_of([&] { keep_micro_batches(schedule, 5); }), {"4 micro-batches", "5"});
  expect_contains(error_of([&] { keep_micro_batches(schedule, 0); }), {"cannot run 0"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
