// Tests where each policy places W, which messages are added, and the names of policies and ops.
#include "twobp/schedule/passes.h"

#include <gtest/gtest.h>

#include "tests/schedule/named.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/generators/generators.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp::TWOBP_FILE {
namespace {

std::string rank_text(const Schedule& schedule, int rank) {
  return text_of(schedule.ranks[rank]);
}

TEST(Instruction, PrintsAsText) {
  EXPECT_EQ(to_string({Op::kForward, 0, 3}), "0F3");
  EXPECT_EQ(to_string({Op::kBackwardP2, 0, 0, 4}), "0W0-3");
  EXPECT_EQ(to_string({Op::kRecvBackward, 12, 7}), "12RECV_B7");
}

TEST(Instruction, HasAKind) {
  for (Op op : {Op::kForward, Op::kBackwardP1, Op::kBackwardP2, Op::kBackward}) {
    EXPECT_TRUE(is_compute(op));
    EXPECT_FALSE(is_receive(op));
  }
  for (Op op : {Op::kRecvForward, Op::kRecvBackward}) EXPECT_TRUE(is_receive(op) && !is_compute(op));
  for (Op op : {Op::kSendForward, Op::kSendBackward}) EXPECT_FALSE(is_receive(op) || is_compute(op));
}

TEST(Policy, NamesRoundTrip) {
  EXPECT_EQ(policy_names(), (std::vector<std::string>{"off", "end", "cooldown", "fill", "placed"}));
  for (P2Policy policy : kPolicies) EXPECT_EQ(parse_policy(policy_name(policy)), policy);
}

TEST(Policy, UnknownNameNamesTheNearest) {
  const std::string error = error_of([] { parse_policy("cool-down"); });
  EXPECT_NE(error.find("unknown p2 policy 'cool-down'"), std::string::npos) << error;
  EXPECT_NE(error.find("did you mean 'cooldown'"), std::string::npos) << error;
}

TEST(ApplyPolicy, OffKeepsB) {
  const Schedule schedule = apply_p2_policy(one_forward_one_backward(2, 3), P2Policy::kOff);
  EXPECT_EQ(schedule.ranks, one_forward_one_backward(2, 3).ranks);
  EXPECT_FALSE(schedule.fills());
}

TEST(ApplyPolicy, EndPutsOneRangeAtTheEnd) {
  const Schedule schedule = apply_p2_policy(one_forward_one_backward(2, 3), P2Policy::kEnd);
  EXPECT_EQ(rank_text(schedule, 0), "0F0 0F1 0I0 0F2 0I1 0I2 0W0-2");
  EXPECT_EQ(rank_text(schedule, 1), "1F0 1I0 1F1 1I1 1F2 1I2 1W0-2");
  EXPECT_FALSE(schedule.fills());
}

TEST(ApplyPolicy, FillIsEndWithAnotherWaitStrategy) {
  const Schedule schedule = apply_p2_policy(gpipe(3, 4), P2Policy::kFill);
  EXPECT_EQ(schedule.ranks, apply_p2_policy(gpipe(3, 4), P2Policy::kEnd).ranks);
  EXPECT_TRUE(schedule.fills());
}

TEST(ApplyPolicy, CooldownRunsTheOldestWAfterEachLateI) {
  const Schedule schedule = apply_p2_policy(one_forward_one_backward(3, 4), P2Policy::kCooldown);
  EXPECT_EQ(rank_text(schedule, 0), "0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3");
  EXPECT_EQ(rank_text(schedule, 1), "1F0 1F1 1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2-3");
  EXPECT_EQ(rank_text(schedule, 2), "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1-3");
}

TEST(ApplyPolicy, SeveralStagesARankEndLastStageFirst) {
  const Schedule schedule = apply_p2_policy(looped_gpipe({0, 1, 1, 0}, 2), P2Policy::kEnd);
  EXPECT_EQ(rank_text(schedule, 0), "0F0 0F1 3F0 3F1 3I0 3I1 0I0 0I1 3W0-1 0W0-1");
  EXPECT_EQ(rank_text(schedule, 1), "1F0 1F1 2F0 2F1 2I0 2I1 1I0 1I1 2W0-1 1W0-1");
}

TEST(ApplyPolicy, PlacedWStaysOrMoves) {
  Schedule schedule = empty_schedule({0}, 2);
  schedule.ranks[0] = {{Op::kForward, 0, 0},
                       {Op::kBackwardP1, 0, 0},
                       {Op::kForward, 0, 1},
                       {Op::kBackwardP2, 0, 0},
                       {Op::kBackward, 0, 1}};
  const auto with = [&](P2Policy policy) { return rank_text(apply_p2_policy(schedule, policy), 0); };
  EXPECT_EQ(with(P2Policy::kPlaced), "0F0 0I0 0F1 0W0 0B1");
  EXPECT_EQ(with(P2Policy::kFill), "0F0 0I0 0F1 0W0 0I1 0W1");
  EXPECT_EQ(with(P2Policy::kOff), "0F0 0B0 0F1 0B1");
  EXPECT_EQ(with(P2Policy::kEnd), "0F0 0I0 0F1 0I1 0W0-1");
  EXPECT_EQ(with(P2Policy::kCooldown), "0F0 0I0 0F1 0I1 0W0 0W1");
}

TEST(ApplyPolicy, PlacedNeedsAScheduleThatPlacesW) {
  const std::string error = error_of([] { apply_p2_policy(gpipe(2, 2), P2Policy::kPlaced); });
  expect_contains(error, {"gpipe", "places no W", "fill"});
}

TEST(ApplyPolicy, ReorderedWIsPlacedInTheOrderOfItsI) {
  Schedule schedule = empty_schedule({0}, 4);
  schedule.allow_reorder = true;
  schedule.ranks[0] = {{Op::kForward, 0, 0, 4}, {Op::kBackward, 0, 2, 2}, {Op::kBackward, 0, 0, 2}};
  const Schedule end = apply_p2_policy(schedule, P2Policy::kEnd);
  EXPECT_EQ(rank_text(end, 0), "0F0-3 0I2-3 0I0-1 0W2-3 0W0-1");
  EXPECT_NO_THROW(validate(end));
  const Schedule cooldown = apply_p2_policy(schedule, P2Policy::kCooldown);
  EXPECT_EQ(rank_text(cooldown, 0), "0F0-3 0I2-3 0W2-3 0I0-1 0W0-1");
}

TEST(AddCommunication, SurroundsOpsThatCrossRanks) {
  const Schedule schedule = add_communication(one_forward_one_backward(2, 2));
  EXPECT_EQ(rank_text(schedule, 0), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1");
  EXPECT_EQ(rank_text(schedule, 1), "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1");
}

TEST(AddCommunication, GradientLeavesBeforeW) {
  const Schedule schedule = add_communication(apply_p2_policy(one_forward_one_backward(2, 1), P2Policy::kCooldown));
  EXPECT_EQ(rank_text(schedule, 1), "1RECV_F0 1F0 1I0 1SEND_B0 1W0");
}

TEST(AddCommunication, AddsNoneOnOneRank) {
  const Schedule schedule = looped_gpipe({0, 0, 0}, 2);
  EXPECT_EQ(add_communication(schedule).ranks, schedule.ranks);
}

TEST(AddCommunication, NeighboursOnOneRankHandOverDirectly) {
  const Schedule schedule = add_communication(looped_gpipe({0, 1, 1, 0}, 1));
  EXPECT_EQ(rank_text(schedule, 0), "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0");
  EXPECT_EQ(rank_text(schedule, 1), "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0");
  EXPECT_NO_THROW(validate(schedule));
}

TEST(AddCommunication, RefusesExistingCommunication) {
  const Schedule once = add_communication(gpipe(2, 2));
  EXPECT_NE(error_of([&] { add_communication(once); }).find("has communication already"), std::string::npos);
}

TEST(FrozenStages, ComeFirstOnEachRank) {
  const auto text = [](int ranks, int micro_batches, int rank) {
    const Schedule plain = make_schedule("1f1b", ranks, micro_batches, P2Policy::kOff);
    return rank_text(after_frozen_stages(plain), rank);
  };
  EXPECT_EQ(text(2, 2, 0),
            "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2RECV_B1 2B1");
  EXPECT_EQ(text(2, 2, 1),
            "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1");
  EXPECT_EQ(text(1, 4, 0), "0F0 0F1 0F2 1F0 1B0 0F3 1F1 1B1 1F2 1B2 1F3 1B3") << "two micro-batches ahead";
}

TEST(FrozenStages, LeaveTheOtherStagesAsTheyAre) {
  int checked = 0;
  for (const std::string& name : schedule_names()) {
    for (const P2Policy policy : policies_of(name)) {
      for (int ranks = 1; ranks <= 4; ++ranks) {
        for (const auto& [micro_batches, slices] : std::vector<std::pair<int, int>>{{1, 1}, {3, 1}, {9, 1}, {3, 2}}) {
          const int stages = stages_on(name, ranks);
          if (!admits(name, stages, ranks, micro_batches, slices)) continue;
          const Schedule plain = make_schedule(name, stages, micro_batches, policy, ranks, slices);
          const Schedule with = ScheduleSource(name).make(stages + ranks, ranks, micro_batches, policy, slices, true);
          EXPECT_EQ(with.frozen, ranks);
          for (int rank = 0; rank < ranks; ++rank) {
            std::vector<Instruction> rest;
            int ahead = 0;
            for (Instruction instruction : with.ranks[rank]) {
              if (instruction.op == Op::kForward)
                ahead += instruction.stage == rank ? 1 : instruction.stage == ranks ? -instruction.count : 0;
              EXPECT_TRUE(rank > 0 || ahead <= 2 * ranks * slices + 1);
              const bool from_frozen = instruction.stage == ranks && instruction.op == Op::kRecvForward;
              if (instruction.stage < ranks || from_frozen) continue;
              instruction.stage -= ranks;
              rest.push_back(instruction);
            }
            EXPECT_EQ(rest, plain.ranks[rank]) << name << ' ' << policy_name(policy) << " on rank " << rank;
            ++checked;
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 1000);
}

TEST(Passes, RefuseStagesThatDoNotExist) {
  Schedule schedule = gpipe(2, 1);
  schedule.ranks[0][0].stage = 2;
  EXPECT_THROW(add_communication(schedule), Error);
  EXPECT_THROW(apply_p2_policy(schedule, P2Policy::kEnd), Error);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
